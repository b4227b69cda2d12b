"""`gspo-megatron report`: writes an HTML file about one run, or a comparison of several."""

from __future__ import annotations

import argparse

from gspo_megatron.cli.arguments import Commands, new_parser


def add_parser(commands: Commands) -> None:
    text = "write report.html about one run, or a comparison of several"
    parser = new_parser(commands, "report", run, text, list_name="runs")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    parser.add_argument(
        "-o", "--output", metavar="DIR", required=True, help="the folder to write into"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the report. Print the results, the settings in which the runs differ, the warnings and,
    at the end, the report's path."""
    from gspo_megatron.observe.report import print_comparison, print_results, write_report

    path = write_report(arguments.runs, arguments.output)
    print_results(arguments.runs)
    print_comparison(arguments.runs)
    print(path)
    return 0
