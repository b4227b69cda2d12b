"""`gspo-megatron report`: one HTML file about one run, or about several compared."""

from __future__ import annotations

import argparse

from gspo_megatron.cli.arguments import Commands, new_parser


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(commands, "report", run, "write report.html about runs", list_name="runs")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where it is written")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its path."""
    from gspo_megatron.observe.report import write_report

    print(write_report(arguments.runs, arguments.output))
    return 0
