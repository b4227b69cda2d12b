"""`gspo-megatron report`: writes an HTML file about one run, or a comparison of several."""

from __future__ import annotations

import argparse

from gspo_megatron.cli.arguments import Commands, new_parser


def add_parser(commands: Commands) -> None:
    text = "write report.html about one run, or a comparison of several"
    parser = new_parser(commands, "report", run, text, list_name="runs")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    where = "the folder to write into; default: the folder of a single run"
    parser.add_argument("-o", "--output", metavar="DIR", help=where)


def run(arguments: argparse.Namespace) -> int:
    """Write the report. Print the results, the settings in which the runs differ, the warnings and,
    at the end, the report's path."""
    if arguments.output is None and len(arguments.runs) > 1:
        arguments.parser.error("a comparison of several runs needs -o/--output")

    from gspo_megatron.observe.report import print_comparison, print_results, write_report

    path = write_report(arguments.runs, arguments.output or arguments.runs[0])
    print_results(arguments.runs)
    print_comparison(arguments.runs)
    print(path)
    return 0
