"""Draw docs/step.svg: the functions that a step calls, in their order, with what they return.

python tools/draw_step.py

Order and names come from the source of rl/loop.py, shapes from the comments of the data classes.
Each function that the step calls must be described in this file; otherwise the script refuses to
draw.
"""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "step.svg"
PACKAGE = ROOT / "gspo_megatron"

# What the picture says about a function: a text, and the fields that the function makes.
STEP: dict[str, tuple[str, ...]] = {
    "self.roll_out": ("responses and their rewards", "RolloutBatch.tokens")
    + ("RolloutBatch.response_lengths", "RolloutBatch.rollout_logprobs", "RolloutGroup.shaped"),
    "self.kept_steps.write": ("keep the inputs (training.keep_step_inputs)",),
    "gather_index": ("what every rank knows of all sequences",)
    + ("StepIndex.response_lengths", "StepIndex.groups", "StepIndex.rewards"),
    "self.updater.objective.advantages.of_step": ("a reward relative to its group",)
    + ("LossInputs.advantages",),
    "plan_step": ("which rank trains on what", "MiniBatch.micro_batches"),
    "redistribute": ("one all-to-all to the ranks that train", "Sequences.tokens")
    + ("Sequences.rollout_logprobs",),
    "update_policy": ("one optimizer update for each mini-batch",),
    "self.collector.source.take_weights": ("new weights to the rollout engine",),
}
COLLECT: dict[str, tuple[str, ...]] = {
    "next": ("the next rollout.prompts_per_step prompts", "RolloutRequest.rows"),
    "collector.sample": ("rollout.group_size responses to each, and their rewards",)
    + ("RolloutBatch.group_index", "RolloutGroup.rewards", "RolloutGroup.shaped"),
    "collector.judge": ("what came of each prompt; without spread: ask again?",),
}
UPDATE: dict[str, tuple[str, ...]] = {
    "updater.build_micro_batches": ("sequences packed by token budget", "PackedBatch.input_ids")
    + ("PackedBatch.targets", "PackedBatch.sequence_index"),
    "updater.compute_old_logprobs": ("forward passes, no gradient", "LossInputs.old_logprobs")
    + ("LossInputs.reference_logprobs",),
    "updater.penalized_advantages": ("only with objective.kl_in: reward",),
    "updater.train": ("pipeline schedule, loss, optimizer", "LossInputs.logprobs")
    + ("LossInputs.entropy", "LossOutputs.loss"),
    "updater.reduce_metrics": ("global sums for metrics.jsonl",),
}
# The functions of rl/loop.py that are drawn, with the box of the step that they belong to.
DRAWN = {
    "step": (STEP, ""),
    "collect": (COLLECT, "self.roll_out"),
    "update_policy": (UPDATE, "update_policy"),
}
# Calls that are not drawn, because they only measure, log, choose or convert.
LEFT_OUT = re.compile(
    r"time\.|StepMetrics|PhaseTimer|DynamicSampling|parallel_state|peak_memory|micro_batch_multiple"
    r"|(len|min|round|zip|part_of|timer|float|sum)$|timer\.|index\.|advantages\.to"
    r"|self\.run_components\.checkpoints\.after_failure"
    r"|collector\.(nothing_scored|sample_rows)|Experience$|RolloutGroup\.|RolloutMetrics"
    r"|metrics\.|chosen\.|share\.|kept\.|group\.|each\."
)

WIDTH, LINE, PAD, GAP = 490, 17, 10, 24
TOP = 46
COLUMNS = (20, 570)


def calls_of(function: str) -> list[str]:
    """Return the calls in a function of rl/loop.py, in the order of the source."""
    tree = ast.parse((PACKAGE / "rl" / "loop.py").read_text(encoding="utf-8"))
    [found] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    calls = [node for node in ast.walk(found) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    names = dict.fromkeys(ast.unparse(call.func) for call in calls)
    return [name for name in names if not LEFT_OUT.match(name)]


def shapes() -> dict[str, str]:
    """Return the shape of each field of all data classes, by Class.field. The shape is in the
    comment after the field, or in the declaration of a column. For other fields, return the type
    of the field."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    comment = lines[item.lineno - 1].partition("  # ")[2]
                    given = re.match(r"(\[.*?\])+( \w+\d+)?|scalar", comment)
                    annotation = ast.unparse(item.annotation)
                    if column := re.search(r"Column\(SEQUENCE, np\.(\w+)", annotation):
                        annotation = f"[num_sequences] {column[1]}"
                    shape = given[0] if given else annotation
                    found[f"{node.name}.{item.target.id}"] = shape
    return found


def svg() -> str:
    """Return the picture."""
    known, parts = shapes(), []
    tops: dict[str, int] = {}  # the tops of the step's boxes
    bottom = 0
    for function, (described, parent) in DRAWN.items():
        if (calls := calls_of(function)) != list(described):
            raise SystemExit(
                f"{function} of rl/loop.py calls {', '.join(calls)}; described in "
                f"tools/draw_step.py, in this order: {', '.join(described)}"
            )
        x, y = COLUMNS[bool(parent)], tops.get(parent, TOP)
        parts.append(_text("title", x, y - 12, function))
        if parent:
            parts.append(f'<path class="part" d="M{COLUMNS[0] + WIDTH} {y + 18} H{x}"/>')
        for number, (call, (text, *fields)) in enumerate(described.items()):
            if number:
                middle = x + WIDTH // 2
                parts.append(f'<path d="M{middle} {y - GAP} V{y - 2}" marker-end="url(#arrow)"/>')
            height = 2 * PAD + LINE * (2 + len(fields))
            box = f'x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="6"'
            parts.append(f'<rect class="{"inner" if parent else "box"}" {box}/>')
            rows = [("name", call.removeprefix("self.")), ("text", text)]
            rows += [("field", f"{name}  {known[name]}") for name in fields]
            for row, (style, content) in enumerate(rows):
                parts.append(_text(style, x + 12, y + PAD + 12 + LINE * row, content))
            tops.setdefault(call, y)
            bottom = max(bottom, y + height + 20)
            y += height + GAP
    width = COLUMNS[1] + WIDTH + 20
    return "\n".join([_HEAD.format(width=width, height=bottom), *parts, "</svg>", ""])


def _text(style: str, x: int, y: int, content: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(content)}</text>'


_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The functions of an RL step in their order, with the shapes of what they return</title>
<style>
text {{ font-family: sans-serif; font-size: 13px; fill: #1f2933; }}
.title, .name, .field {{ font-family: monospace; }}
.title {{ font-size: 16px; font-weight: bold; }}
.name {{ font-weight: bold; fill: #1d4e89; }}
.field {{ font-size: 11px; fill: #52606d; }}
.box {{ fill: #e8f1fa; stroke: #1d4e89; }}
.inner {{ fill: #f3f6e8; stroke: #5b7a1e; }}
path {{ stroke: #52606d; fill: none; }}
.part {{ stroke-dasharray: 4 3; }}
</style>
<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0 0 L8 4 L0 8" style="fill: #52606d"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>"""


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
