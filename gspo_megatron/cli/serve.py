"""`gspo-megatron serve`: starts a vLLM server for a run, or the servers of this node for a run on
other nodes."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gspo_megatron.cli.arguments import DTYPES, Commands, integer, new_parser
from gspo_megatron.errors import DataError, UserError
from gspo_megatron.files import WRONG_VALUES, parse_json
from gspo_megatron.hub import folder_of
from gspo_megatron.process.signals import end_signals

_OWN_OPTIONS = ("model", "host", "port", "dtype")


def add_parser(commands: Commands) -> None:
    parser = new_parser(
        commands,
        "serve",
        run,
        "start a vLLM server for rollout.vllm.urls, or the servers that a run wants here (--join)",
        list_name="words",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="a Hugging Face folder, or ORG/NAME[@REVISION] of the Hub; or a checkpoint or a run, "
        "which is converted first, to a folder in TMPDIR (default: /tmp) that is removed at the "
        "end. With --join: the run folder, or the configuration of the run",
    )
    parser.add_argument(
        "words",
        metavar="OPTION=VALUE",
        nargs="*",
        default=[],
        help="further options of vLLM, such as max_num_seqs=64; they replace those set here. With "
        "--join: section.key=value, as for the run",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="start and end the servers that a run wants on this node, until told to end. The run "
        "names its nodes in GSPO_ROLLOUT_NODES",
    )
    parser.add_argument(
        "--name", help="with --join: the name of this node in the run (default: its host name)"
    )
    parser.add_argument("--python", help="the interpreter that has vLLM (default: this one)")
    parser.add_argument(
        "--host",
        help="the address to listen on (default: 127.0.0.1; with --join this node's address "
        "towards the run's first node)",
    )
    port = partial(integer, wanted="a port from 1 to 65535", least=1, most=65535)
    parser.add_argument("--port", type=port, help="the port to listen on (default: a free one)")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="the precision to compute in (default: that of the weights)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM, Ctrl-C, or the end of the terminal."""
    from gspo_megatron.rollout.vllm.installed import device_of
    from gspo_megatron.rollout.vllm.process import hold_port

    if arguments.join:
        for name in ("port", "dtype"):
            if getattr(arguments, name) is not None:
                arguments.parser.error(f"--{name}: not with --join: the run decides it")
        return _join(arguments)
    if arguments.name is not None:
        arguments.parser.error("--name: only with --join")
    options = _options(arguments.words)
    # A port that is in use is reported here, not after a long conversion.
    hold_port(_host(arguments), arguments.port or 0).close()
    source = folder_of(arguments.source, "SOURCE", weights=True)
    if (source / "config.json").is_file():
        return _serve(arguments, source, options)
    from gspo_megatron.checkpoint.convert_adapters import any_to_hf

    if arguments.source.exists():
        device_of(_python(arguments))  # reports a missing vLLM before the conversion
    # A signal during the conversion must not leave the weights behind.
    for each in end_signals():
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="gspo-megatron-serve-") as folder:
        try:
            taken, notes = any_to_hf(arguments.source, Path(folder) / "hf")
        except DataError as error:
            if folder in str(error):
                raise DataError(f"{error}; TMPDIR may name a folder with more space") from None
            raise
        for note in [*notes, f"serving {taken}"]:
            print(note, file=sys.stderr, flush=True)
        return _serve(arguments, Path(folder) / "hf", options)


def _serve(arguments: argparse.Namespace, folder: Path, options: dict[str, Any]) -> int:
    from gspo_megatron.families import is_score_model
    from gspo_megatron.rollout.vllm import standalone

    config = _config_of(folder)
    own = "float32" if config.get("dtype", config.get("torch_dtype")) == "float32" else "bfloat16"
    dtype = DTYPES[arguments.dtype] if arguments.dtype else own
    scores = is_score_model(config)
    command = standalone.reward_server_command if scores else standalone.server_command
    words, environ = command(folder, _python(arguments), dtype, options)
    address = (_host(arguments), arguments.port)
    standalone.until_told_to_end(
        lambda ended: standalone.serve(words, environ, *address, ended, scores=scores)
    )
    return 0


def _python(arguments: argparse.Namespace) -> str:
    return arguments.python or sys.executable


def _host(arguments: argparse.Namespace) -> str:
    return arguments.host or "127.0.0.1"


def _join(arguments: argparse.Namespace) -> int:
    from gspo_megatron.rollout.store import FOLDER
    from gspo_megatron.rollout.vllm.agent import NodeAgent
    from gspo_megatron.rollout.vllm.remote import FOLDER as SERVERS
    from gspo_megatron.rollout.vllm.standalone import until_told_to_end

    folder = arguments.source
    # A configuration that is missing must not be taken for a run folder that does not exist yet.
    if folder.is_file() or (folder.suffix in (".yaml", ".yml") and not folder.is_dir()):
        from gspo_megatron.config.load import load_config

        folder = Path(str(load_config(folder, arguments.words).logging.dir))
    elif arguments.words:
        arguments.parser.error(f"{arguments.words[0]}: only with a configuration")
    name = arguments.name or socket.gethostname()
    agent = NodeAgent(folder / FOLDER / SERVERS, name, arguments.host, arguments.python)
    where = f" at {arguments.host}" if arguments.host else ""
    print(f"{name}: waits{where} for the run in {folder}", flush=True)
    until_told_to_end(agent.run)
    return 0


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's options, by name. Raises UserError."""
    from gspo_megatron.config.load import parse_yaml

    options = {}
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not equals or not name.isidentifier():
            raise UserError(f"{word}: allowed: OPTION=VALUE, as max_num_seqs=64")
        if name in _OWN_OPTIONS:
            raise UserError(f"{word}: allowed: SOURCE, --host, --port and --dtype")
        if name == "middleware":  # ours asks for the token
            raise UserError(f"{word}: would replace the check of the token; leave it out")
        options[name] = parse_yaml(text, word)
    return options


def _config_of(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json. They give the kind of model and the dtype of its weights.
    By default, vLLM would compute in half precision even with weights in fp32."""
    file = folder / "config.json"
    try:
        return dict(parse_json(file.read_bytes()))
    except (OSError, *WRONG_VALUES) as error:
        raise DataError(f"{file}: not the description of a model: {error}") from None
