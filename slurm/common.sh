# shellcheck shell=bash
# Shared by the batch scripts of this folder: setting up a job, checking its configuration, running its
# tasks, and requeuing it when they were stopped. README.md lists the settings.
#
# A script sets GSPO_HOME, the folder of this repository, sources this file, and calls one of
#
#     gspo_main COMMAND CONFIG [section.key=value ...] [--check-only] [--fresh] [--rollout-nodes K]
#                                    # COMMAND: train, pretrain, sft or reward-model
#     gspo_once WORD ...             # `gspo-megatron WORD ...` in one process

# The program's exit codes for "told to stop, and saved" and "another rank is gone": process/failures.py
GSPO_STOPPED=75 GSPO_LOST_PEER=76

gspo_say() { echo "slurm: $*" >&2; }

# A request to stop may come at any time, even during the check of the configuration.
gspo_told_to_stop=
trap 'gspo_told_to_stop=1' USR1 TERM

gspo_set_up() {
    local ranks_per_node end name own
    # Settings of the cluster: modules, network interfaces, containers. The file is optional.
    local site=${GSPO_SITE:-$GSPO_HOME/slurm/site.sh}
    if [ -f "$site" ]; then
        set +u # `module` and `conda activate` read variables that may not be set
        # shellcheck source=/dev/null
        . "$site"
        set -u
    elif [ -n "${GSPO_SITE:-}" ]; then
        gspo_say "GSPO_SITE = $GSPO_SITE: no such file"
        exit 2
    fi
    # In a heterogeneous job these variables have the number of their component in their names. The
    # tasks are those of the first one, as for srun.
    for name in JOB_NODELIST JOB_NUM_NODES NTASKS NTASKS_PER_NODE CPUS_PER_TASK; do
        own=SLURM_${name}_HET_GROUP_0
        [ -z "${!own:-}" ] || export "SLURM_$name=${!own}"
    done
    if [ -z "${SLURM_NTASKS:-}" ]; then
        ranks_per_node=${SLURM_NTASKS_PER_NODE:-1}
        export SLURM_NTASKS=$((ranks_per_node * SLURM_JOB_NUM_NODES))
    fi
    if [ -z "${GSPO_PYTHON:-}" ]; then
        GSPO_PYTHON=python3
        if [ -z "${GSPO_CONTAINER:-}" ] && [ -x "$GSPO_HOME/.venv/bin/python" ]; then
            GSPO_PYTHON=$GSPO_HOME/.venv/bin/python
        fi
    fi
    export PYTHONPATH=$GSPO_HOME${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
    # `sbatch --export=NONE` is for the batch script: without this, srun would hide from the tasks what
    # the script sets for them.
    unset SLURM_EXPORT_ENV
    # Otherwise every task would use all cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # Since Slurm 22.05 srun does not inherit sbatch's --cpus-per-task.
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
        export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}
    fi
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    # The tasks need the end of the job, and a container has no squeue to ask. Old versions of Slurm
    # do not set this variable.
    if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
        end=$(gspo_job_field EndTime '[0-9T:-]*' 2>/dev/null)
        end=$(date -d "${end:-unknown}" +%s 2>/dev/null) && export SLURM_JOB_END_TIME=$end
    fi
    gspo_container
    gspo_keep_log
    gspo_say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $SLURM_NTASKS tasks on" \
        "$SLURM_JOB_NUM_NODES nodes, $SLURM_JOB_NODELIST"
}

# Copy what earlier starts of a requeued job have written out of its log, which all starts append to:
# that of start N to LOG.N.
gspo_keep_log() {
    local log number line="^slurm: job $SLURM_JOB_ID, restart"
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || return 0
    log=$(gspo_job_field StdOut '.*')
    [ -f "$log" ] || return 0
    for ((number = 0; number < SLURM_RESTART_COUNT; number++)); do
        [ -e "$log.$number" ] ||
            sed -n "/$line $number:/,/$line $((number + 1)):/{/$line $((number + 1)):/!p}" "$log" \
                >"$log.$number"
    done
}

# Sets the words before a command that runs once (gspo_before_once), the options of srun
# (gspo_srun_options; those for a container's image alone: gspo_image_options) and the words before the
# command of each task (gspo_before_task).
gspo_container() {
    local mounts=$GSPO_HOME:$GSPO_HOME,$PWD:$PWD kind=${GSPO_CONTAINER:-none} program name
    [ ! -d "${HF_HOME:-}" ] || mounts+=,$HF_HOME:$HF_HOME
    mounts+=${GSPO_CONTAINER_MOUNTS:+,$GSPO_CONTAINER_MOUNTS}
    gspo_before_once=() gspo_before_task=() gspo_image_options=()
    gspo_srun_options=(--kill-on-bad-exit=1 --label --cpu-bind="${GSPO_CPU_BIND:-cores}")
    if [ "$kind" != none ]; then
        export PYTHONNOUSERSITE=1 # the home folder is mounted, and its packages are not the image's
        [ ! -d "$kind" ] || kind=sandbox
    fi
    case $kind in
    none) ;;
    *.sif | sandbox | docker://* | oras://*)
        program=$(gspo_apptainer)
        for name in $(gspo_names_for_image); do
            # That of a task may differ from that of the batch script.
            [ "$name" = CUDA_VISIBLE_DEVICES ] || export "${program^^}ENV_$name=${!name}"
        done
        gspo_before_task=("$program" exec --nv --bind "$mounts" --pwd "$PWD" "$GSPO_CONTAINER")
        gspo_before_once=("${gspo_before_task[@]}")
        ;;
    *) # enroot, through the srun options of the pyxis plugin
        # shellcheck disable=SC2046  # names have no blanks
        gspo_image_options=(--container-image="$GSPO_CONTAINER" --container-mounts="$mounts"
            --container-workdir="$PWD"
            --container-env="$(gspo_joined $(gspo_names_for_image) GSPO_STATE)")
        gspo_srun_options+=("${gspo_image_options[@]}")
        gspo_before_once=(srun --nodes=1 --ntasks=1 "${gspo_image_options[@]}")
        ;;
    esac
    # Split into words: no option of srun needs blanks.
    # shellcheck disable=SC2206
    gspo_srun_options+=(${GSPO_SRUN_OPTIONS:-})
}

gspo_apptainer() {
    if ! command -v apptainer >/dev/null && command -v singularity >/dev/null; then
        echo singularity
    else
        echo apptainer
    fi
}

# The values that an image has for variables replace those of the job, unless the container's program is
# told otherwise. Prints the names of the variables whose values in the job count.
gspo_names_for_image() {
    local names='PYTHON(PATH|UNBUFFERED|FAULTHANDLER|NOUSERSITE)|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES'
    names+='|(MASTER|GSPO|NCCL|GLOO|HF|TORCH|NVTE|WANDB|MLFLOW|VLLM)_.*'
    compgen -e | grep -xE "$names${GSPO_CONTAINER_ENV:+|${GSPO_CONTAINER_ENV//,/|}}"
}

gspo_python() { "${gspo_before_once[@]}" "$GSPO_PYTHON" -m gspo_megatron "$@"; }

gspo_once() {
    gspo_set_up
    gspo_python "$@"
}

gspo_main() {
    local command=$1 stage=${1/#train/rl} words=() flags=() check_only='' rollout_nodes=0 word code
    while shift && [ $# -gt 0 ]; do
        word=$1
        case $word in
        --check-only) check_only=1 ;;
        # Only for the first start: later starts continue in a folder that is not empty.
        --fresh) [ -e "$(gspo_checked)" ] || flags+=(--fresh) ;;
        --rollout-nodes=*) rollout_nodes=${word#*=} ;;
        --rollout-nodes) rollout_nodes=${2:-none} && shift ;;
        -*)
            gspo_say "$word: not known; allowed: --check-only, --fresh, --rollout-nodes K; options of sbatch come before the script"
            exit 2
            ;;
        *) words+=("$word") ;;
        esac
    done
    if [ ${#words[@]} -eq 0 ]; then
        gspo_say "no configuration: sbatch [options] slurm/NAME.sbatch CONFIG.yaml [section.key=value ...]"
        exit 2
    fi
    gspo_set_up
    gspo_split_nodes "$command" "$rollout_nodes"
    # A requeued job was checked at its first start.
    if [ -n "$check_only" ] || [ ! -e "$(gspo_checked)" ]; then
        gspo_gpu_memory
        # --stage: the check refuses the configuration of another stage.
        gspo_python check "${words[@]}" "${flags[@]}" --stage "${stage//-/_}" \
            --world-size "$SLURM_NTASKS" "${gspo_memory_options[@]}"
        code=$?
        if [ -n "$check_only" ] || [ $code -ne 0 ]; then
            exit $code
        fi
        : >"$(gspo_checked)" || exit
    fi
    if [ -n "$gspo_told_to_stop" ]; then
        gspo_end $GSPO_STOPPED # there is nothing to save yet
    fi
    gspo_start_agents "${words[@]}"
    gspo_run_tasks "$GSPO_PYTHON" -m gspo_megatron "$command" "${words[@]}" "${flags[@]}"
    code=$?
    # When a node dies, the tasks on the other nodes fail at once, or have no servers any more. Slurm
    # may notice the dead node only minutes later, after the end of the job.
    if gspo_may_be_a_nodes_fault "$code" && gspo_a_node_is_gone; then
        gspo_say "a node of the job does not answer: the run continues from its last checkpoint"
        gspo_end $GSPO_STOPPED
    fi
    case $code in
    0 | 2 | "$GSPO_STOPPED") gspo_forget_kills ;;
    *)
        if gspo_killed_by_an_earlier_start "$code"; then
            gspo_say "killed from outside: the run continues from its last checkpoint"
            gspo_end $GSPO_STOPPED
        fi
        ;;
    esac
    gspo_end "$code"
}

# Sets the option of the check for a GPU's memory in GB (gspo_memory_options): GSPO_GPU_MEMORY, or the
# smallest GPU of this host. Empty if there is no GPU.
gspo_gpu_memory() {
    local gigabytes=${GSPO_GPU_MEMORY:-}
    # If the job hides the GPUs, its tasks use none.
    case ${CUDA_VISIBLE_DEVICES-all} in '' | -1 | NoDevFiles) gigabytes=${gigabytes:-none} ;; esac
    if [ -z "$gigabytes" ] && command -v nvidia-smi >/dev/null; then
        # One line for each GPU: a number in MiB, or words such as [N/A].
        gigabytes=$(timeout 30 nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits |
            awk '/^ *[0-9]+ *$/ && (!least || $1 < least) { least = $1 }
                END { printf "%d", least * 1.048576 / 1000 }')
    fi
    gspo_memory_options=()
    case $gigabytes in
    '' | 0 | none) ;;
    *) gspo_memory_options=(--gpu-memory "$gigabytes") ;;
    esac
}

# The file that marks the job as checked. The restart count is not enough: a first start may end before
# the check, because its node dies or a user requeues it.
gspo_checked() { echo "$PWD/.gspo-megatron-$SLURM_JOB_ID-checked"; }

# Chooses the nodes of rollout servers: the last ones of the job, as many as told, or all of the second
# component of a heterogeneous job. The tasks run on the others: as many on each as before, and the first
# one is the job's first node.
gspo_split_nodes() {
    local names nodes command=$1 count=$2 all=$SLURM_JOB_NUM_NODES
    gspo_rollout_nodes=() gspo_rollout_group=()
    unset GSPO_ROLLOUT_NODES
    if [ -n "${SLURM_HET_SIZE:-}" ]; then
        if [ "$command $SLURM_HET_SIZE $count" != "train 2 0" ]; then
            gspo_say "a heterogeneous job of $SLURM_HET_SIZE components: allowed: 2, in train_gspo.sbatch, without --rollout-nodes"
            exit 2
        fi
        nodes=$all gspo_rollout_group=(--het-group=1)
        mapfile -t gspo_rollout_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
    elif [ "$count" = 0 ]; then
        return 0
    else
        if [[ $command != train || ! $count =~ ^[1-9][0-9]*$ ]] || [ "$count" -ge "$all" ]; then
            gspo_say "--rollout-nodes $count: allowed in train_gspo.sbatch: less than the $all nodes of the job"
            exit 2
        fi
        if [ $((SLURM_NTASKS % all)) -ne 0 ]; then
            gspo_say "--rollout-nodes $count: $SLURM_NTASKS tasks on $all nodes; allowed: --ntasks-per-node of sbatch"
            exit 2
        fi
        nodes=$((all - count))
        mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        gspo_rollout_nodes=("${names[@]:nodes}")
        export SLURM_NTASKS=$((SLURM_NTASKS * nodes / all))
        gspo_srun_options+=(--nodes="$nodes" --ntasks="$SLURM_NTASKS"
            --nodelist="$(gspo_joined "${names[@]:0:nodes}")")
    fi
    # The program starts its servers on these nodes.
    GSPO_ROLLOUT_NODES=$(gspo_joined "${gspo_rollout_nodes[@]}")
    export GSPO_ROLLOUT_NODES
    gspo_say "$SLURM_NTASKS tasks on $nodes nodes; rollout servers on $GSPO_ROLLOUT_NODES"
}

gspo_joined() {
    local IFS=,
    echo "$*"
}

# Start an agent on each rollout node, which starts and ends servers there as the run tells it. Each is
# a step of its own, so that one may die without the others. They end with the job.
gspo_start_agents() {
    local node
    for node in "${gspo_rollout_nodes[@]}"; do
        gspo_keep_agent "$node" "$@" &
    done
}

# Run an agent, and start it again when it dies. In a shell of its own, which may outlive the script by
# some seconds ($$ is the script's process).
gspo_keep_agent() {
    local node=$1
    shift
    trap '' USR1
    while true; do
        # Without a number of CPUs it gets all that the job has on the node.
        env -u SRUN_CPUS_PER_TASK -u SLURM_CPUS_PER_TASK -u SLURM_TRES_PER_TASK \
            srun --overlap --nodes=1 --ntasks=1 \
            --nodelist="$node" --cpu-bind=none "${gspo_rollout_group[@]}" "${gspo_image_options[@]}" \
            "${gspo_before_task[@]}" "$GSPO_PYTHON" -m gspo_megatron serve --join "$@" \
            --name "$node"
        case $? in 0 | 2) return ;; esac # told to end, or the user's mistake
        sleep 5
        kill -0 $$ 2>/dev/null || return 0
        gspo_say "the agent on $node has ended: starting it again"
    done
}

# Whether a run may end with this code because a node is gone. 2 is a mistake of the user, or the end
# of all servers.
gspo_may_be_a_nodes_fault() {
    case $1 in
    0 | "$GSPO_STOPPED") return 1 ;;
    2) [ ${#gspo_rollout_nodes[@]} -gt 0 ] ;;
    esac
}

# The name of this job for programs of Slurm. One task of an array has the array's number, and that
# would mean all tasks.
gspo_job() {
    if [ "${SLURM_ARRAY_JOB_ID:-}" = "$SLURM_JOB_ID" ]; then
        echo "${SLURM_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

# The job's state in Slurm. The controller may be away for some minutes, for example while it restarts.
gspo_state() {
    local state='' tries=18
    while [ -z "$state" ] && ((tries-- > 0)); do
        state=$(gspo_job_field JobState '[A-Z_]*')
        [ -n "$state" ] || sleep 10
    done
    echo "$state"
}

# What `scontrol show job` says: the field $1, of the form $2. A heterogeneous job has one record for
# each component; the first is that of this script.
gspo_job_field() {
    scontrol show job "$(gspo_job)" | sed -n "0,/ $1=/s/.* $1=\\($2\\).*/\\1/p"
}

# Whether some node of the job cannot start a process any more.
gspo_a_node_is_gone() {
    [ "$(gspo_state)" = RUNNING ] || return 1
    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ] && ! gspo_nodes_answer "$SLURM_JOB_NUM_NODES"; then
        return 0
    fi
    [ ${#gspo_rollout_group[@]} -gt 0 ] &&
        ! gspo_nodes_answer ${#gspo_rollout_nodes[@]} "${gspo_rollout_group[@]}"
}

# Whether as many nodes can start a process; further words are options of srun.
gspo_nodes_answer() {
    timeout "${GSPO_PROBE_SECONDS:-60}" srun --overlap --nodes="$1" --ntasks="$1" \
        --ntasks-per-node=1 --cpus-per-task=1 "${@:2}" true
}

# Whether a signal for an earlier start may have killed tasks. If a node is gone, Slurm keeps its
# signals until the node is back. The steps of a restarted job have the same numbers, so the new tasks
# get these signals. Where the task's shell was killed too, only the tasks on other nodes can tell: they
# lost their connection. A first start cannot get such signals (a killed task may have run out of
# memory), and they do not come more than a few times in a row.
gspo_killed_by_an_earlier_start() {
    local killed=137 terminated=143 most=5 # 128 + the signal's number; starts
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || return 1
    case $1 in
    "$killed" | "$terminated" | "$GSPO_LOST_PEER") ;;
    *)
        gspo_forget_kills
        return 1
        ;;
    esac
    echo "$SLURM_RESTART_COUNT" >>"$(gspo_kills)"
    [ "$(wc -l <"$(gspo_kills)")" -le $most ]
}

# The file that lists the starts that were killed in a row.
gspo_kills() { echo "$PWD/.gspo-megatron-$SLURM_JOB_ID-kills"; }

gspo_forget_kills() { rm -f "$(gspo_kills)"; }

# Runs in each task, below srun. The first exit code that is not 0 goes into a file, because srun then
# ends the other tasks and may return their code. "Stopped and saved" does not end the other tasks.
# "Another rank is gone" goes into a file of its own: that rank may be slower to write its code. So may
# tasks that srun then terminates.
gspo_task() {
    local code file=first terminated=143
    # The program inherits that SIGUSR1 is ignored, so a SIGUSR1 before its own handler is set does not
    # kill it. The batch script sends the signal again.
    trap '' USR1
    trap : TERM # the program handles it; this shell waits for the program
    "$@"
    code=$?
    [ $code -ne $GSPO_LOST_PEER ] || file=lost
    [ $code -ne $terminated ] || [ ! -s "$GSPO_STATE/lost" ] || file=lost
    if [ $code -ne 0 ]; then
        (
            set -o noclobber
            echo "$code $SLURM_PROCID ${SLURMD_NODENAME:-unknown}" >"$GSPO_STATE/$file"
        ) 2>/dev/null
    fi
    [ $code -ne $GSPO_STOPPED ] || code=0
    exit $code
}

# Run a command as all tasks of the job. Returns 0, GSPO_STOPPED, or the code of the task that failed
# first. GSPO_LOST_PEER only if no task has another reason.
gspo_run_tasks() {
    local first lost code rank='' node='' tasks_pid ticks=0 ticks_told=0 ticks_failed=0
    export GSPO_STATE=$PWD/.gspo-megatron-$SLURM_JOB_ID # on a file system that all nodes share
    first=$GSPO_STATE/first lost=$GSPO_STATE/lost
    mkdir -p "$GSPO_STATE" || return
    rm -f "$first" "$lost"
    # shellcheck disable=SC2016  # expanded by the task's shell
    srun "${gspo_srun_options[@]}" bash -c '. "$GSPO_HOME/slurm/common.sh" && gspo_task "$@"' \
        task "${gspo_before_task[@]}" "$@" &
    tasks_pid=$!
    while kill -0 $tasks_pid 2>/dev/null; do
        # The signal is sent every ten seconds, because the program may not have been ready for it. It
        # is not sent in the first seconds, when the tasks' shells may not be ready.
        if [ -n "$gspo_told_to_stop" ] && ((ticks >= 5 && ticks_told++ % 10 == 0)); then
            [ $ticks_told -gt 1 ] || gspo_say "told to stop: asking the tasks to save the run"
            kill -USR1 $tasks_pid # srun passes it on to all tasks
        fi
        # The other tasks may wait for the failed one for ever.
        if { [ -s "$lost" ] || { [ -s "$first" ] && ! grep -q "^$GSPO_STOPPED " "$first"; }; } &&
            ((ticks_failed++ >= ${GSPO_GRACE_SECONDS:-10})); then
            kill -TERM $tasks_pid # srun kills them
        fi
        ((ticks++))
        sleep 1 &
        wait $! # a signal interrupts wait, but not a command in the foreground
    done
    wait $tasks_pid
    code=$?
    if [ -s "$lost" ] && { [ ! -s "$first" ] || grep -q "^$GSPO_STOPPED " "$first"; }; then
        first=$lost
    fi
    if [ -s "$first" ]; then
        local first_code
        read -r first_code rank node <"$first"
        if [ $code -eq 0 ] || [ "$first_code" -ne $GSPO_STOPPED ]; then
            code=$first_code
        else
            rank='' node='' # that task saved and ended; another one failed after it
        fi
    fi
    rm -rf "$GSPO_STATE"
    case $code in
    0 | "$GSPO_STOPPED") ;;
    *) gspo_say "failed with exit code $code${node:+, first in task $rank on $node, whose lines begin with \"$rank: \"}" ;;
    esac
    return "$code"
}

# End the job with an exit code, or requeue it if the code is GSPO_STOPPED.
gspo_end() {
    local state
    if [ "$1" -ne $GSPO_STOPPED ]; then
        gspo_forget_kills
        rm -f "$(gspo_checked)"
        exit "$1"
    fi
    state=$(gspo_state)
    if [ "${GSPO_REQUEUE:-1}" = 0 ]; then
        rm -f "$(gspo_checked)"
    fi
    if [ "$state" != RUNNING ]; then
        # Cancelled by its owner, or requeued by Slurm itself.
        gspo_say "the job is ${state:-unknown to Slurm}: the script does not requeue it"
    elif [ "${GSPO_REQUEUE:-1}" = 0 ]; then
        gspo_say "GSPO_REQUEUE = 0: submit the same command to continue"
    elif scontrol requeue "$(gspo_job)"; then
        gspo_say "back in the queue"
    else
        gspo_say "Slurm did not requeue the job: submit the same command to continue"
    fi
    exit "$1"
}
