"""The RL step.

    prompts -> responses -> rewards -> advantages -> plan -> redistribute -> old log-probs
            -> one optimizer update for each mini-batch -> weights to the rollout engine -> log

`ReinforcementLoop.step` is the whole step; `collect` and `update_policy` are its two halves. Every
rank runs the same code.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, micro_batch_multiple
from gspo_megatron.batching.plan import MiniBatch, plan_step
from gspo_megatron.batching.redistribute import Sequences, StepIndex, gather_index, redistribute
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.config import Config, recomputes_old_logprobs
from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.config.phases import is_border, later_phases_need_reference, phase_end
from gspo_megatron.config.schema import STEP_BITS
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.data.selection import PromptSelection, identity
from gspo_megatron.errors import DataError, EpisodeError, RewardError, RolloutError, UserError
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.objectives import Objective
from gspo_megatron.observe.collapse import Alarm
from gspo_megatron.observe.metrics_files import DRAWS_FILE, RL, read_draws
from gspo_megatron.observe.progress import Progress
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.devices import peak_memory_bytes
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.rewards.moments import RunningMoments
from gspo_megatron.rl.evaluation import Suites, accuracy_text, lines_of
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.rl.rollout_metrics import RolloutMetrics
from gspo_megatron.rl.rollouts import Collector, DynamicSampling, Experience
from gspo_megatron.rl.step_inputs import KeptSteps, read_experience, write_rollouts
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.types import RolloutGroup

# Names of warnings that are shown once in a run, even if the run is resumed.
NOISE_WARNING = "ratio/noise_floor"
COLLAPSE_WARNING = "training.on_collapse"


@dataclass
class RunComponents:
    """The parts of an RL run; `rl.run` builds them."""

    config: Config
    policy: Policy
    inputs: Inputs
    collector: Collector
    builder: MicroBatchBuilder
    objective: Objective
    logger: RunLogger
    checkpoints: Checkpoints


# Errors of rollouts that all ranks raise together. The policy is intact, so the run is saved as it
# was after the last complete step. A DataError means that the store or the weights for servers
# cannot be written, or that the store is damaged.
_ENDS_BETWEEN_STEPS = (DataError, EpisodeError, RewardError, RolloutError)


class _StopBeforeUpdate(Exception):  # noqa: N818 (not an error)
    """A stop signal has come during a rollout, so the step ends without an update."""

    def __init__(self, experience: Experience, before: dict[str, Any]) -> None:
        """before: the values of `RunState.before_rollouts`."""
        super().__init__()
        self.experience, self.before = experience, before


class ReinforcementLoop:
    """RL steps, with evaluations and checkpoints between them."""

    def __init__(self, run: RunComponents) -> None:
        """Continue from the run's checkpoint, if there is one."""
        self.run_components, self.config, self.policy = run, run.config, run.policy
        trains, step = run.config.training.steps > 0, run.checkpoints.finished_steps
        needed = run.objective.needs_reference and trains
        start = run.checkpoints.start
        kept = needed or (trains and later_phases_need_reference(run.config, start.next_step))
        with run.checkpoints.reference_weights(needed=needed, kept=kept):
            optimizer, updates = self.config.optimizer, self.config.objective.mini_batches
            schedule = Schedule.of(optimizer, self.config.training.steps, updates)
            self.trainer = build_trainer(run.policy, optimizer, schedule)
            self.updater = PolicyUpdater(
                run.policy,
                self.trainer,
                run.builder,
                run.objective,
                self.config.objective,
                self.config.routing,
                recomputes=recomputes_old_logprobs(self.config),
            )
        self.collector, self.device = run.collector, run.builder.device
        self.suites = Suites(self.config, run.collector)
        run.collector.model_rewards.moments = RunningMoments(run.checkpoints.reward_moments)
        # The configured budget is for one rank. A context-parallel group shares a micro-batch.
        cp_size = run.policy.config.context_parallel_size
        self.token_budget = run.config.training.micro_batch_tokens * cp_size
        self.has_servers = run.config.rollout.engine == "vllm"
        self.data_group = data_parallel_group()
        # The responses of the next step, if the run was stopped between its rollout and its update.
        self.restored: Experience | None = None
        saved = start.state.rollouts if start.state else None
        if start.checkpoint is not None and saved is not None:
            self.restored = read_experience(start.checkpoint, saved, run.policy)
        self.loader = order_of_prompts(run, step + 1 + (self.restored is not None))
        self.done = run.checkpoints.restore(self.trainer, self.loader, updates)
        self.last = phase_end(self.config, start.next_step)
        # The metrics of the last step, if the run ended because the evaluation failed, or because
        # no server took the weights of that step.
        self.unevaluated = start.state.unevaluated if start.state else None
        self.kept_steps = KeptSteps(self.config, run.policy, run.logger)

    def step(self, step: int) -> dict[str, float]:
        """Run one RL step. Returns the step's metrics, which are the same on every rank."""
        # An earlier start of the run may have generated the responses.
        earlier = 0.0 if self.restored is None else self.restored.rollout_seconds
        timer = PhaseTimer(self.device, earlier)
        experience = self.roll_out(step)
        self.kept_steps.write(step, experience)
        index = gather_index(experience.batch, experience.shaped, self.data_group)
        advantages, token_advantages = self.updater.objective.advantages.of_step(
            index.rewards, index.groups, experience.turns
        )
        plan = plan_step(
            index.lengths,
            index.masked_lengths,
            branches=index.branch_lengths(),
            # dynamic sampling may leave fewer sequences than mini-batches
            mini_batches=min(self.config.objective.mini_batches, len(index.lengths)),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            token_budget=self.token_budget,
            micro_batch_multiple=micro_batch_multiple(self.policy),
            padded=self.updater.builder.padded,
            prompts=index.prompts() if self.updater.builder.shares_prompts else None,
        )
        sequences = redistribute(
            experience.batch,
            index,
            plan,
            self.data_group,
            context_parallel_size=self.policy.config.context_parallel_size,
            token_advantages=token_advantages,
        )
        experience.batch.routes = None  # `sequences` have the routes
        metrics = update_policy(self.updater, sequences, index, plan, advantages, timer)
        metrics = {**experience.metrics, **metrics}
        try:
            with timer("sync"):
                metrics |= self.collector.source.take_weights(version=step)
        except _ENDS_BETWEEN_STEPS as error:  # the update is done, but no server has its weights
            metrics |= timer.step_metrics(experience, self.has_servers)
            self.run_components.checkpoints.after_failure(step, error, metrics)
        return metrics | timer.step_metrics(experience, self.has_servers)

    def run(self) -> None:
        """Run all remaining steps. Raises StopRun after saving if the run was told to stop."""
        steps, run = self.config.training.steps, self.run_components
        sync = self.collector.source.take_weights(version=self.done)
        title = run.objective.name if steps else "evaluation"
        progress_of_run = run.logger.progress(steps, title, self.done)
        # the collapse that ended an earlier start of the run, if there was one
        alarm = run.checkpoints.watch.alarm
        with contextlib.closing(self.suites), progress_of_run as progress:
            self.collector.source.report = progress.doing
            if self.unevaluated is not None:
                # `take_weights` above has sent the weights of this step, if no server had them.
                sync = {name: value for name, value in sync.items() if name.startswith("sync/")}
                self._end_step(self.done, sync | self.unevaluated, progress)
            elif self.restored is None and run.checkpoints.is_new:
                before = self.evaluate(0)
                if before:
                    run.logger.write(RL, 0, before)
                    when = " before RL" if steps else ""
                    if "evaluation/accuracy" in before:
                        text = accuracy_text(before, self.config.evaluation.correct_at)
                        progress.note(f"held-out accuracy{when}: {text}")
                    progress.update(0, before)
                run.checkpoints.before_first_step()
            elif alarm is not None and self.done < steps:  # training.on_collapse may have changed
                goes_on = self._goes_on_after(alarm, self.done, progress)
                if not goes_on:
                    raise UserError(run.checkpoints.collapsed_text(self.done))
            progress.begin_steps()
            for step in range(self.done + 1, self.last + 1):
                if run.checkpoints.back is None:
                    self._whole_step(step, progress)

    def _whole_step(self, step: int, progress: Progress) -> None:
        """Run one step to its end. If a stop signal has come during the rollout, save the responses
        and raise StopRun. An update that makes the weights non-finite is a collapse, too. After
        such a collapse the run can only roll back, because no usable weights are left to save."""
        try:
            metrics = self.step(step)
        except _StopBeforeUpdate as stop:
            experience = stop.experience
            description, write = experience.describe(), partial(write_rollouts, experience)
            self.run_components.checkpoints.stop_before_update(
                step, stop.before, description, write
            )
        except FloatingPointError as error:
            if self.config.training.on_collapse != "rollback":
                raise
            alarm = self.run_components.checkpoints.lose(step, str(error))
            if not self._goes_on_after(alarm, step, progress):
                raise
        else:
            self._end_step(step, metrics, progress)

    def _end_step(self, step: int, metrics: dict[str, float], progress: Progress) -> None:
        """Evaluate and save if due, and log the metrics. After a collapse, end the run or roll back
        (see `_goes_on_after`)."""
        run, steps = self.run_components, self.config.training.steps
        intervals = (self.config.training.evaluation_interval, self.config.evaluation.interval)
        due = [step == steps or (every > 0 and step % every == 0) for every in intervals]
        if any(due):
            try:
                metrics |= self.evaluate(step, *due)
            except _ENDS_BETWEEN_STEPS as error:
                run.checkpoints.after_failure(step, error, metrics)
        alarm = run.checkpoints.judge(step, metrics)
        run.logger.write(RL, step, metrics)
        progress.update(step, metrics)
        warning = self._noise_warning(metrics)
        if warning:
            progress.note(warning)
        ends = alarm is not None and not self._goes_on_after(alarm, step, progress)
        if run.checkpoints.back is not None:
            return
        # If the evaluation of this step succeeded only after a resume, the step is saved again,
        # without the mark that its evaluation is missing.
        is_last, self.unevaluated = step == steps or self.unevaluated is not None, None
        run.checkpoints.end_of_step(
            step, metrics, is_last=is_last or ends, is_border=is_border(self.config, step)
        )
        self.collector.source.after_checkpoint(run.checkpoints.saved_step(step))
        if ends:
            raise UserError(run.checkpoints.collapsed_text(step))

    def _goes_on_after(self, alarm: Alarm, step: int, progress: Progress) -> bool:
        """Do what training.on_collapse says. Returns whether the run continues. If it does, it
        continues from this step, or, after a rollback, from the checkpoint `Checkpoints.back`."""
        checkpoints, training = self.run_components.checkpoints, self.config.training
        if training.on_collapse == "warn":
            if COLLAPSE_WARNING not in checkpoints.warned:
                checkpoints.warned.append(COLLAPSE_WARNING)
                text = "training.on_collapse = warn: the run goes on"
                progress.note(f"warning: {alarm.collapse}; {text}")
            return True
        if training.on_collapse == "stop" or checkpoints.rollbacks >= training.max_rollbacks:
            return False
        if (healthy := checkpoints.roll_back(alarm, step)) is None:
            return False
        count = f"rollback {checkpoints.rollbacks} of {training.max_rollbacks}"
        progress.note(f"{alarm.collapse}; {count}: the run goes on after step {healthy}")
        return True

    # The parts of a step, in order

    def roll_out(self, step: int) -> Experience:
        """Return the step's scored responses: new responses, or the responses that an earlier start
        of the run saved."""
        run, experience, self.restored = self.run_components, self.restored, None
        if experience is None:
            request = self._request(step)
            ahead = self.config.rollout.staleness > 0
            rows = self.loader.rows_of_step(self._draw_number(step), ahead=ahead)
            moments = {**run.checkpoints.reward_moments}
            before = {"loader": self.loader.state_dict(), "reward_moments": moments}
            try:
                self._begin_requests(step, first=step)
                experience = collect(self.collector, rows, request)
                self._add_selection_metrics(experience)
            except _ENDS_BETWEEN_STEPS as error:
                self.loader.load_state_dict(before["loader"])  # a resumed run uses the same prompts
                run.checkpoints.reward_moments = moments
                run.checkpoints.after_failure(step - 1, error)
            if run.checkpoints.must_stop():
                raise _StopBeforeUpdate(experience, before)
        else:
            self._begin_requests(step, first=step + 1)
        records = [{"step": step, **each} for each in experience.draws]
        run.logger.write_draws(records)
        run.logger.write_samples(step, experience.samples)
        if isinstance(self.loader, PromptSelection):
            self.loader.learn(records)
        return experience

    def _request(self, step: int) -> RolloutRequest:
        """Make the request of a step, without the prompts.

        Servers may generate with weights that are up to `rollout.staleness` steps old.
        """
        rollout, seed = self.config.rollout, self.config.training.seed
        return RolloutRequest(
            f"step_{step:08d}",
            "data.prompts",
            rows=[],
            first=0,
            per_prompt=rollout.group_size,
            sampling=Sampling.of(rollout),
            seed=(seed << 32) + self._draw_number(step),
            version=max(step - 1 - rollout.staleness, 0),
        )

    def _draw_number(self, step: int) -> int:
        """Return the number that decides the step's random numbers. A rollback changes this number,
        so that the samples that led to a collapse are not generated again."""
        return step + (self.run_components.checkpoints.rollbacks << STEP_BITS)

    def _begin_requests(self, step: int, first: int) -> None:
        """Make servers generate for this step and for later steps, while the policy trains.

        first: the step that uses the loader's next prompts. The loader does not advance, so that a
        resumed run uses the same prompts for the same step.
        """
        if not self.config.rollout.staleness:
            return  # each step generates its own responses
        # Requests end at the last step of this phase, because the next phase has its own
        # configuration.
        last = min(step + self.config.rollout.staleness, self.last)
        ahead = range(first, last + 1)
        for number, rows in zip(ahead, self.loader.peek(len(ahead)), strict=True):
            self.collector.source.begin(part_of(self._request(number), 0, rows))

    def _add_selection_metrics(self, experience: Experience) -> None:
        """Add the metrics of data.selection to the metrics of the step, and mark the prompts that
        were drawn at random."""
        if isinstance(self.loader, PromptSelection):
            experience.metrics |= self.loader.metrics()
            for record in experience.draws[: self.loader.explored()]:
                record["explored"] = True

    def evaluate(self, step: int, prompts: bool = True, suites: bool = True) -> dict[str, float]:
        """Evaluate data.eval_prompts and the suites, if the run has them. Returns the metrics."""
        run, metrics, responses = self.run_components, {}, []
        for evaluator in [self.collector] * prompts + [self.suites] * suites:
            figures, records = evaluator.evaluate(step)
            metrics |= figures
            responses += records
        run.logger.write_evaluation(step, responses)
        for line in lines_of(self.config, metrics):
            run.logger.note(f"step {step}, {line}")
        return metrics

    def _noise_warning(self, metrics: dict[str, float]) -> str | None:
        """Return a warning if the clip range of sequence ratios is narrower than their noise.

        With such a range, the clip cuts noise instead of learning. The warning is shown once in a
        run. Stale responses give no warning, because their metrics do not show this noise.
        """
        section, warned = self.config.objective, self.run_components.checkpoints.warned
        if NOISE_WARNING in warned or section.import_path is not None:
            return None
        if metrics.get("staleness/max"):
            return None
        recipe, floor = resolve_objective(section), metrics["ratio/noise_floor"]
        if not recipe.clips_sequences:
            return None
        narrow = min(recipe.parameters["clip_low"], recipe.parameters["clip_high"])
        if not floor > narrow:  # a NaN, if the first mini-batch has no tokens to learn from
            return None
        warned.append(NOISE_WARNING)
        if section.old_logprobs == "rollout":
            advice = "widen objective.clip_low and clip_high, or set old_logprobs = recompute"
        else:
            advice = (
                "old_logprobs = recompute keeps it out of the ratio, but not out of the samples"
            )
        return (
            f"warning: the clip range {narrow:g} is narrower than the noise of the sequence ratio, "
            f"{floor:.2g} (ratio/noise_floor: trainer against rollout engine, same weights): "
            f"{advice}"
        )


def order_of_prompts(run: RunComponents, step: int) -> PromptLoader | PromptSelection:
    """Make the object that chooses the prompts of each step, from `step` on.

    data.selection needs the records of all steps before it, which the main rank reads.
    """
    config, inputs = run.config, run.inputs
    data, per_step, seed = config.data, config.rollout.prompts_per_step, config.training.seed
    if not (data.selection.is_on and inputs.train):
        # a run that only evaluates needs no training prompts
        sizes = inputs.train_sizes or [len(inputs.train) or 1]
        return PromptLoader(sizes, per_step, seed, shuffle=data.shuffle, weights=data.weights)
    return PromptSelection(
        [*map(identity, inputs.train)],
        data.selection,
        per_step,
        seed,
        step=step,
        staleness=config.rollout.staleness,
        records=on_main(lambda: _records_before(run)),
    )


def _records_before(run: RunComponents) -> list[dict[str, Any]]:
    """Return the records of draws.jsonl. Called on the main rank. Raises DataError if the last
    ones are missing: the run would choose other prompts, without a word."""
    folder, state = run.logger.folder, run.checkpoints.start.state
    records = read_draws(folder)
    last = max((record["step"] for record in records), default=0)
    # a checkpoint of a run without data.selection has no "draw"
    if state is not None and "draw" in state.loader and last < state.step:
        raise DataError(
            f"{folder / DRAWS_FILE}: ends at step {last}, and the checkpoint is of step "
            f"{state.step}; data.selection needs the records of all steps: put the whole file of "
            "this run here"
        )
    return records


def collect(collector: Collector, rows: Iterator[list[int]], of_step: RolloutRequest) -> Experience:
    """Collect this rank's share of the step's responses. This is the first half of a step.

    rows: yields the numbers of the next `rollout.prompts_per_step` prompts, which are the same on
    every rank. of_step: the request without its prompts. Dynamic sampling may need several
    requests, and may leave ranks with different numbers of groups. Raises, on all ranks, the errors
    of `RolloutSource.take`. Also raises an EpisodeError or RewardError if only some responses have
    rewards of turns, or if no group has rewards.
    """
    start, config, metrics = time.perf_counter(), collector.config, RolloutMetrics(collector)
    kept, samples, draws = [], [], []
    chosen = DynamicSampling(
        config.rollout.prompts_per_step,
        config.rollout.max_refills,
        enabled=config.rollout.dynamic_sampling,
    )
    num_requests = 0
    while chosen.wants_more:
        request = part_of(of_step, num_requests, next(rows), chosen.num_groups)
        num_requests += 1
        share = collector.sample(request)
        metrics.add(share)
        records, has_failed = collector.judge(request, share.group)
        chosen.add([record["spread"] for record in records], has_failed)
        draws += records
        # A request whose responses all failed may lack columns, such as the routes.
        if candidates := chosen.candidates(request.first):
            kept.append(share.group.without_texts().of_prompts(candidates))
        if request.first == 0:
            samples = collector.sample_rows(request, share.group)
    if not chosen.groups():
        raise collector.nothing_scored("of a step", metrics.failed)
    reduced = metrics.reduce()
    reduced["reward/zero_spread_groups"] = chosen.zero_spread_share
    if config.reward.on_failure == "drop_group":
        reduced["reward/failed_groups"] = float(sum(chosen.has_failed))
    responses = chosen.num_groups * config.rollout.group_size
    return Experience(
        RolloutGroup.join([each.of_prompts(chosen.groups()) for each in kept]),
        collector.device,
        metrics=reduced | chosen.metrics(),
        num_tokens=round(reduced["response/length_mean"] * responses),
        has_turns=metrics.has_turns,
        reward_seconds=metrics.reward_seconds,
        rollout_seconds=time.perf_counter() - start,
        samples=samples,
        draws=draws,
    )


def part_of(
    of_step: RolloutRequest, number: int, rows: list[int], first: int = 0
) -> RolloutRequest:
    """Make the step's first request (number 0) or a refill.

    first: the number of the request's first prompt within the step.
    """
    return replace(of_step, name=f"{of_step.name}_{number}", rows=rows, first=first)


def update_policy(
    updater: PolicyUpdater,
    sequences: Sequences,
    index: StepIndex,
    plan: Sequence[MiniBatch],
    advantages: Tensor | None,
    timer: PhaseTimer | None = None,
) -> dict[str, float]:
    """Update the policy on this rank's `sequences`. This is the second half of a step.

    advantages: [num_sequences], for all sequences of the step; with objective.kl_in = reward they
    are computed here. Returns metrics, which are the same on every rank.
    """
    timer = timer or PhaseTimer(updater.device)
    with timer("logprob"):
        mini_batches = updater.build_micro_batches(plan, sequences, index)
        updater.compute_old_logprobs(mini_batches)
        if updater.penalizes_rewards:  # objective.kl_in: reward
            advantages = updater.penalized_advantages(mini_batches, index)
    assert advantages is not None, "only rewards with a penalty have none before this"
    advantages = advantages.to(updater.device)
    with timer("train"):
        for mini_batch, micro_batches in zip(plan, mini_batches, strict=True):
            updater.train(mini_batch, micro_batches, advantages)
    return updater.reduce_metrics()


class PhaseTimer:
    """Measures the time of a step, which begins with this object, and of its phases, for the
    metrics perf/PHASE_seconds. earlier: seconds that the step has taken before."""

    def __init__(self, device: torch.device, earlier: float = 0.0) -> None:
        self._start = time.perf_counter() - earlier
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[f"perf/{phase}_seconds"] = time.perf_counter() - start

    def step_metrics(self, experience: Experience, has_servers: bool) -> dict[str, float]:
        """Return the perf/ metrics of the step so far.

        With servers, the trainer is idle during the rollout.
        """
        seconds, idle = time.perf_counter() - self._start, {}
        if has_servers:
            idle["perf/trainer_idle_share"] = experience.rollout_seconds / seconds
        return {
            "perf/step_seconds": seconds,
            "perf/rollout_seconds": experience.rollout_seconds,
            "perf/reward_seconds": experience.reward_seconds,
            **self.seconds,
            **idle,
            "perf/tokens_per_second": experience.num_tokens / seconds,
            "perf/peak_memory_bytes": peak_memory_bytes(),
        }
