"""Make the tables of Transformer Engine's signatures that tests bind calls against.

python tools/te_signatures.py ENGINE OUT.json MEGATRON...

ENGINE is a checkout of github.com/NVIDIA/TransformerEngine or an unpacked wheel of
`pip download --no-deps transformer-engine==VERSION`; MEGATRON the folders above `megatron`, of the
versions of Megatron-Core to read, for example the site-packages of an environment. The table has
what they and gspo_megatron name, and nothing else.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.te_calls import ENGINE, MODULE, VALUE, check_calls

ROOT = Path(__file__).resolve().parents[1]
# Of megatron/core: what no specification of ours reaches.
OTHERS = (
    "datasets",
    "distributed/fsdp",
    "export",
    "inference",
    "models/T5",
    "models/audio",
    "models/bert",
    "models/hybrid",
    "models/mamba",
    "models/mimo",
    "models/multimodal",
    "models/vision",
    "post_training",
    "resharding",
    "ssm",
    "tensor_parallel/generalized_tensor_parallelism.py",
    "tensor_parallel/inference_layers.py",
    "transformer/custom_layers/batch_invariant_kernels.py",
)
_ANY = "(*args, **kwargs)"  # of a class of torch
# Methods that instances call and names of annotations, which te_calls does not follow.
MORE = (
    "common.recipe.Format",
    "pytorch.DotProductAttention.forward",
    "pytorch.Fp8Padding.forward",
    "pytorch.Fp8Unpadding.forward",
    "pytorch.LayerNorm.forward",
    "pytorch.RMSNorm.forward",
    "pytorch.ops.FusibleOperation",
    "pytorch.optimizers.FusedAdam.step",
)


def files_of(root: Path) -> list[Path]:
    """The files of Megatron-Core, or of gspo_megatron, that name Transformer Engine."""
    core = root / "megatron" / "core"
    folder = core if core.is_dir() else root / "gspo_megatron"
    skipped = tuple((core / name).as_posix() for name in OTHERS)
    paths = (path for path in folder.rglob("*.py") if not path.as_posix().startswith(skipped))
    return [path for path in sorted(paths) if ENGINE in path.read_text()]


class Sources:
    """What a dotted name of Transformer Engine is, from its source (see te_calls.Look)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, dict[str, ast.stmt]] = {}
        self.asked: dict[str, str | None] = {}

    def __call__(self, path: str) -> str | None:
        if path not in self.asked:
            self.asked[path] = self._text(path)
        return self.asked[path]

    def _text(self, path: str) -> str | None:
        found = self._find(path)
        if found is None:
            owner, _, name = path.rpartition(".")
            of = self._find(owner)
            if of is None:  # of a value: what it has is not in the source
                return VALUE if self._text(owner) == VALUE else None
            return self._method(of, name) if isinstance(of[1], ast.ClassDef) else None
        module, node = found
        if node is None:
            return MODULE
        if isinstance(node, ast.ClassDef):
            return self._method((module, node), "__init__")
        if isinstance(node, ast.FunctionDef):
            return _text_of(node.args, 0)
        return VALUE

    def _method(self, of: tuple[str, ast.ClassDef], name: str) -> str | None:
        module, node = of
        if name == "apply":  # of an autograd.Function: forward without its context
            name = "forward"
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                marks = {ast.unparse(d).rpartition(".")[2] for d in statement.decorator_list}
                is_function = any(ast.unparse(b).endswith("autograd.Function") for b in node.bases)
                bound = "staticmethod" not in marks or is_function
                return _text_of(statement.args, int(bound))
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = [statement.target] if hasattr(statement, "target") else statement.targets
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    return VALUE
        if name == "__init__" and (maker := self._dataclass(of)):
            fields = [f"{n}={d}" if d else n for n, d in self._fields(of).items()]
            ignored = ["**ignored"] if maker.startswith("pydantic") else []
            return f"({', '.join(fields + ignored)})"
        for base in node.bases:
            found = self._find_in(module, ast.unparse(base))
            if found is None or not isinstance(found[1], ast.ClassDef):
                return _ANY
            text = self._method((found[0], found[1]), name)
            if text is not None:
                return text
        return "()" if name == "__init__" else None

    def _dataclass(self, of: tuple[str, ast.ClassDef]) -> str | None:
        """The package whose `dataclass` the class is decorated with."""
        module, node = of
        for decorator in node.decorator_list:
            name = ast.unparse(decorator).partition("(")[0]
            made = self._names(module).get(name)
            if name.endswith("dataclass"):
                return made.module if isinstance(made, ast.ImportFrom) else "dataclasses"
        return None

    def _fields(self, of: tuple[str, ast.ClassDef]) -> dict[str, str]:
        module, node = of
        if self._dataclass(of) is None:
            return {}
        fields: dict[str, str] = {}
        for base in node.bases:
            found = self._find_in(module, ast.unparse(base))
            if found is not None and isinstance(found[1], ast.ClassDef):
                fields |= self._fields((found[0], found[1]))
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = statement.value
                fields[statement.target.id] = ast.unparse(value) if value is not None else ""
        return fields

    def _find(self, path: str) -> tuple[str, ast.stmt | None] | None:
        """Module and definition; (module, None) of a module."""
        module, *rest = path.split(".")
        for i, name in enumerate(rest):
            node = self._names(module).get(name)
            if isinstance(node, ast.ImportFrom) and self._absolute(module, node) == module:
                node = None  # from . import module
            if isinstance(node, ast.ImportFrom):
                found = self._imported(module, node, name)
                if found is None or i == len(rest) - 1:
                    return found
                module, definition = found
                if definition is not None:
                    return None
            elif node is not None:
                return (module, node) if i == len(rest) - 1 else None
            elif self._file(f"{module}.{name}") is not None:
                module = f"{module}.{name}"
            else:
                return self._starred(module, rest[i:])
        return module, None

    def _find_in(self, module: str, name: str) -> tuple[str, ast.stmt | None] | None:
        """What a name is inside a module."""
        return self._find(f"{module}.{name}")

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str
    ) -> tuple[str, ast.stmt | None] | None:
        origin = next(a.name for a in node.names if (a.asname or a.name) == name)
        source = self._absolute(module, node)
        return self._find(f"{source}.{origin}") if source.split(".")[0] == ENGINE else None

    def _starred(self, module: str, rest: Sequence[str]) -> tuple[str, ast.stmt | None] | None:
        for name, node in self._names(module).items():
            if name.startswith("*") and isinstance(node, ast.ImportFrom):
                found = self._find(".".join([self._absolute(module, node), *rest]))
                if found is not None:
                    return found
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self._file(module)
        assert file is not None
        drop = node.level - (file.name == "__init__.py")
        parts = module.split(".")[: len(module.split(".")) - drop]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _file(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        files = (path / "__init__.py", path.with_suffix(".py"))
        return next((file for file in files if file.is_file()), None)

    def _names(self, module: str) -> dict[str, ast.stmt]:
        if module not in self._modules:
            file = self._file(module)
            body = ast.parse(file.read_text()).body if file is not None else []
            self._modules[module] = dict(_definitions(body))
        return self._modules[module]


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for i, node in enumerate(body):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.ImportFrom():
                for alias in node.names:
                    yield (f"*{i}" if alias.name == "*" else alias.asname or alias.name), node
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((t.id, node) for t in targets if isinstance(t, ast.Name))
            case ast.If():
                yield from _definitions([*node.orelse, *node.body])
            case ast.Try():
                handlers = [s for handler in node.handlers for s in handler.body]
                yield from _definitions([*handlers, *node.body])


def _text_of(arguments: ast.arguments, bound: int) -> str:
    """Without annotations, and without `bound` leading ones."""
    plain = [*arguments.posonlyargs, *arguments.args]
    assert len(arguments.posonlyargs) == 0, "a list of positional ones is not needed yet"
    if arguments.vararg:
        arguments.vararg.annotation = None
    if arguments.kwarg:
        arguments.kwarg.annotation = None
    for argument in (*plain, *arguments.kwonlyargs):
        argument.annotation = None
    kept = ast.arguments(**{**vars(arguments), "args": arguments.args[bound:]})
    return f"({ast.unparse(kept)})"


def version_of(engine: Path) -> str:
    """Of a checkout, or of an unpacked wheel."""
    file = engine / "build_tools" / "VERSION.txt"
    if file.is_file():
        return file.read_text().strip()
    (folder,) = engine.glob("transformer_engine-*.dist-info")
    return folder.name.removeprefix("transformer_engine-").removesuffix(".dist-info")


def main(arguments: Sequence[str]) -> None:
    engine, out, *megatrons = map(Path, arguments)
    look, version = Sources(engine), version_of(engine)
    for root in (ROOT, *megatrons):
        found = check_calls(root, files_of(root), version, look)
        print(f"{root}: {found.calls} calls of {len(found.names)} names")
        print(*found.problems, sep="\n")
    for name in MORE:
        look(f"{ENGINE}.{name}")
    table = {"version": version, "names": dict(sorted(look.asked.items()))}
    out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
