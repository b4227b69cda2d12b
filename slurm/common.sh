# shellcheck shell=bash
# What the batch scripts of this folder share: the set-up of a job, the check before it, its tasks,
# and what becomes of the job when they end. README.md says what can be set from outside.
#
# A script that has GSPO_HOME, the folder of this repository, and sources this file, calls one of
#
#     gspo_main COMMAND CONFIG [section.key=value ...] [--check-only] [--fresh]
#                                    # COMMAND: train, sft or pretrain
#     gspo_once WORD ...             # `gspo-megatron WORD ...` in one process

GSPO_STOPPED=75 # the program's exit code for "told to stop, and saved": cli/failures.py

gspo_say() { echo "slurm: $*" >&2; }

# A request to stop may come at any time, while the configuration is being checked too.
gspo_told_to_stop=
trap 'gspo_told_to_stop=1' USR1 TERM

gspo_set_up() {
    local ranks_per_node end
    # Of the cluster: modules, network interfaces, containers. No file: nothing to do.
    local site=${GSPO_SITE:-$GSPO_HOME/slurm/site.sh}
    if [ -f "$site" ]; then
        # shellcheck source=/dev/null
        . "$site"
    elif [ -n "${GSPO_SITE:-}" ]; then
        gspo_say "GSPO_SITE = $GSPO_SITE: no such file"
        exit 2
    fi
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
    # Every task would take all cores for itself.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # sbatch's --cpus-per-task is not srun's since Slurm 22.05.
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
        export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}
    fi
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    # For the watch over the time limit in a container, where there is no squeue; old versions of
    # Slurm do not set it.
    if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
        end=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.*EndTime=\([0-9T:-]*\).*/\1/p')
        end=$(date -d "${end:-unknown}" +%s 2>/dev/null) && export SLURM_JOB_END_TIME=$end
    fi
    gspo_container
    gspo_say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $SLURM_NTASKS tasks on" \
        "$SLURM_JOB_NUM_NODES nodes, $SLURM_JOB_NODELIST"
}

# Sets what goes before a command that runs once (gspo_before_once), among srun's options
# (gspo_srun_options) and before each task's command (gspo_before_task).
gspo_container() {
    local mounts=$GSPO_HOME:$GSPO_HOME,$PWD:$PWD${GSPO_CONTAINER_MOUNTS:+,$GSPO_CONTAINER_MOUNTS}
    gspo_before_once=() gspo_before_task=()
    gspo_srun_options=(--kill-on-bad-exit=1 --label --cpu-bind="${GSPO_CPU_BIND:-cores}")
    case ${GSPO_CONTAINER:-} in
    '') ;;
    *.sif)
        gspo_before_task=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$GSPO_CONTAINER")
        gspo_before_once=("${gspo_before_task[@]}")
        ;;
    *) # enroot, by the options that pyxis gives to srun
        local image=(--container-image="$GSPO_CONTAINER" --container-mounts="$mounts"
            --container-workdir="$PWD")
        gspo_srun_options+=("${image[@]}")
        gspo_before_once=(srun --nodes=1 --ntasks=1 "${image[@]}")
        ;;
    esac
    # Words, not a line: no option of srun's needs blanks.
    # shellcheck disable=SC2206
    gspo_srun_options+=(${GSPO_SRUN_OPTIONS:-})
}

gspo_python() { "${gspo_before_once[@]}" "$GSPO_PYTHON" -m gspo_megatron "$@"; }

gspo_once() {
    gspo_set_up
    gspo_python "$@"
}

gspo_main() {
    local command=$1 words=() flags=() check_only='' word code
    shift
    for word in "$@"; do
        case $word in
        --check-only) check_only=1 ;;
        # The folder of a run that is gone on with is not empty.
        --fresh) [ -e "$(gspo_checked)" ] || flags+=(--fresh) ;;
        -*)
            gspo_say "$word: not known; legal: --check-only, --fresh; options for Slurm come before the script"
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
    # Not again for a job that comes back with what was found sound.
    if [ -n "$check_only" ] || [ ! -e "$(gspo_checked)" ]; then
        gspo_gpu_memory
        # As the command will read it: the file of another stage is refused here.
        gspo_python check "${words[@]}" "${flags[@]}" --stage "${command/#train/rl}" \
            --world-size "$SLURM_NTASKS" "${gspo_memory_options[@]}"
        code=$?
        if [ -n "$check_only" ] || [ $code -ne 0 ]; then
            exit $code
        fi
        : >"$(gspo_checked)" || exit
    fi
    gspo_preflight "${words[@]}" || gspo_end $?
    if [ -n "$gspo_told_to_stop" ]; then
        gspo_end $GSPO_STOPPED # there is nothing to save yet
    fi
    gspo_run_tasks "$GSPO_PYTHON" -m gspo_megatron "$command" "${words[@]}" "${flags[@]}"
    code=$?
    case $code in
    0 | 2 | "$GSPO_STOPPED") gspo_forget_kills ;;
    *)
        # The other nodes' tasks fail at once where one node dies, but Slurm may take minutes to
        # notice, and the job would be over by then.
        if gspo_a_node_is_gone; then
            gspo_say "a node of the job does not answer: the run goes on from its last checkpoint"
            gspo_end $GSPO_STOPPED
        fi
        if gspo_killed_by_an_earlier_start "$code"; then
            gspo_say "killed from outside: the run goes on from its last checkpoint"
            gspo_end $GSPO_STOPPED
        fi
        ;;
    esac
    gspo_end "$code"
}

# Sets what tells the check how much memory a GPU has (gspo_memory_options), in GB: what
# GSPO_GPU_MEMORY says, else the smallest GPU of this host. Nothing where there is none.
gspo_gpu_memory() {
    local gigabytes=${GSPO_GPU_MEMORY:-}
    # Of a job that hides the GPUs, the tasks use none.
    if [ -z "$gigabytes" ] && [ -n "${CUDA_VISIBLE_DEVICES-all}" ] && command -v nvidia-smi >/dev/null; then
        # A line a GPU, in MiB; or words, where one does not tell.
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

# The file that says that the job was checked. A start may be over before: where its node dies, or
# somebody requeues it.
gspo_checked() { echo "$PWD/.gspo-megatron-$SLURM_JOB_ID-checked"; }

# Measure the nodes: one that is slow or broken ends the job, with its name in the log. Where nobody
# says, on GPUs alone: cores that others use too are no measure.
gspo_preflight() {
    [ "${GSPO_PREFLIGHT:-${SLURM_GPUS_ON_NODE:+1}}" = 1 ] || return 0
    local options=()
    read -ra options <<<"${GSPO_PREFLIGHT_OPTIONS:-}"
    gspo_run_tasks "$GSPO_PYTHON" -m gspo_megatron preflight "$@" "${options[@]}"
}

# The job's state, as Slurm has it.
gspo_state() { scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }

# Whether not every node of the job can still start a process.
gspo_a_node_is_gone() {
    [ "$SLURM_JOB_NUM_NODES" -gt 1 ] && [ "$(gspo_state)" = RUNNING ] || return 1
    ! timeout "${GSPO_PROBE_SECONDS:-60}" srun --overlap --nodes="$SLURM_JOB_NUM_NODES" \
        --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 true
}

# Whether the tasks may have died of a signal to those of an earlier start. What Slurm could not
# deliver to a node that was gone it delivers when the node is back, and a job's steps have the same
# numbers after a restart. A first start is killed by nothing of the kind (but by the kernel, where
# memory runs out). More than a few in a row are no late signals.
gspo_killed_by_an_earlier_start() {
    local killed=137 terminated=143 most=5 # 128 + the signal's number; starts
    if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || { [ "$1" -ne $killed ] && [ "$1" -ne $terminated ]; }; then
        gspo_forget_kills
        return 1
    fi
    echo "$SLURM_RESTART_COUNT" >>"$(gspo_kills)"
    [ "$(wc -l <"$(gspo_kills)")" -le $most ]
}

# The file with the starts that were killed, one after another.
gspo_kills() { echo "$PWD/.gspo-megatron-$SLURM_JOB_ID-kills"; }

gspo_forget_kills() { rm -f "$(gspo_kills)"; }

# In each task, below srun. Its exit code goes into a file where it is the first that is not 0: after
# one, srun ends the other tasks, and returns their code. "Stopped and saved" ends no other task.
gspo_task() {
    local code
    # Ignored signals stay ignored in the program: it must not die of one that comes before it has
    # said what to do then. The batch script asks again.
    trap '' USR1
    trap : TERM # the program's alone; this shell waits for it
    "$@"
    code=$?
    if [ $code -ne 0 ]; then
        (
            set -o noclobber
            echo "$code $SLURM_PROCID ${SLURMD_NODENAME:-unknown}" >"$GSPO_STATE/first"
        ) 2>/dev/null
    fi
    [ $code -ne $GSPO_STOPPED ] || code=0
    exit $code
}

# Run a command as all tasks of the job. Returns 0, GSPO_STOPPED, or the code of the task that failed
# first.
gspo_run_tasks() {
    local first code rank='' node='' tasks_pid ticks=0 ticks_told=0 ticks_failed=0
    export GSPO_STATE=$PWD/.gspo-megatron-$SLURM_JOB_ID # on a file system that all nodes share
    first=$GSPO_STATE/first
    mkdir -p "$GSPO_STATE" || return
    rm -f "$first"
    # shellcheck disable=SC2016  # expanded by the task's shell
    srun "${gspo_srun_options[@]}" bash -c '. "$GSPO_HOME/slurm/common.sh" && gspo_task "$@"' \
        task "${gspo_before_task[@]}" "$@" &
    tasks_pid=$!
    while kill -0 $tasks_pid 2>/dev/null; do
        # Again and again: the program may not have been ready for it. Not in the first seconds, when
        # the tasks' shells may not.
        if [ -n "$gspo_told_to_stop" ] && ((ticks >= 5 && ticks_told++ % 10 == 0)); then
            [ $ticks_told -gt 1 ] || gspo_say "told to stop: asking the tasks to save the run"
            kill -USR1 $tasks_pid # srun passes it on to all tasks
        fi
        # The tasks that did not fail may be waiting for the one that did, without end.
        if [ -s "$first" ] && ! grep -q "^$GSPO_STOPPED " "$first" &&
            ((ticks_failed++ >= ${GSPO_GRACE_SECONDS:-10})); then
            kill -TERM $tasks_pid # srun kills them
        fi
        ((ticks++))
        sleep 1 &
        wait $! # unlike a command in the foreground it is left when a signal comes
    done
    wait $tasks_pid
    code=$?
    if [ -s "$first" ]; then
        local first_code
        read -r first_code rank node <"$first"
        if [ $code -eq 0 ] || [ "$first_code" -ne $GSPO_STOPPED ]; then
            code=$first_code
        fi
    fi
    rm -rf "$GSPO_STATE"
    case $code in
    0 | "$GSPO_STOPPED") ;;
    *) gspo_say "failed with exit code $code${node:+, first in task $rank on $node, whose lines begin with \"$rank: \"}" ;;
    esac
    return "$code"
}

# End the job with a code, or put it back into the queue where that is GSPO_STOPPED.
gspo_end() {
    local state
    if [ "$1" -ne $GSPO_STOPPED ]; then
        gspo_forget_kills
        rm -f "$(gspo_checked)"
        exit "$1"
    fi
    state=$(gspo_state)
    if [ "$state" = CANCELLED ] || [ "${GSPO_REQUEUE:-1}" = 0 ]; then
        rm -f "$(gspo_checked)"
    fi
    if [ "$state" != RUNNING ]; then
        # Cancelled by its owner, or in the queue again by Slurm's own doing.
        gspo_say "the job is $state, and left as it is"
    elif [ "${GSPO_REQUEUE:-1}" = 0 ]; then
        gspo_say "GSPO_REQUEUE = 0: submit the same command to go on"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        gspo_say "back in the queue"
    else
        gspo_say "not put back into the queue: submit the same command to go on"
    fi
    exit "$1"
}
