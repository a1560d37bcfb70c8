# SPDX-License-Identifier: Apache-2.0
"""Results as a page to read or to publish."""

from collections import Counter
from collections.abc import Sequence

from lab.conformance.runner import Result, Verdict

_MARKS = {Verdict.HOLDS: "holds", Verdict.BROKEN: "**broken**", Verdict.NOT_APPLICABLE: "-"}
_ROLES = {"apart": "encoder and decoder apart", "both": "`ec_both`"}


def line(result: Result) -> str:
    """Return one result as a line, to be printed during a run."""
    where = f"{result.runner} {result.roles}"
    said = f": {result.said}" if result.said else ""
    effect = f" ({result.effect.value})" if result.effect else ""
    return f"{result.verdict.value:<15}{where:<9}{result.rule.name}{effect}{said}"


def summary(results: Sequence[Result]) -> str:
    """Return how many rules and checks there are, and how many are broken."""
    names = {each.rule.name for each in results}
    broken = {each.rule.name for each in results if each.verdict is Verdict.BROKEN}
    counts = Counter(each.verdict for each in results)
    return (
        f"{len(names)} rules, {len(broken)} broken "
        f"({counts[Verdict.HOLDS]} checks hold, {counts[Verdict.BROKEN]} do not, "
        f"{counts[Verdict.NOT_APPLICABLE]} are not applicable)"
    )


def page(connector: str, vllm: str, results: Sequence[Result]) -> str:
    """Return a Markdown page: the broken rules with their effects, then every rule."""
    return "\n".join(
        [
            f"# {connector} on vLLM {vllm}",
            "",
            f"{summary(results)}.",
            "",
            *_broken(results),
            "## Every rule",
            "",
            *_table(results),
            "",
            *_notes(results),
        ]
    )


def _broken(results: Sequence[Result]) -> list[str]:
    by_rule: dict[str, list[Result]] = {}
    for each in results:
        if each.verdict is Verdict.BROKEN:
            by_rule.setdefault(each.rule.name, []).append(each)
    if not by_rule:
        return []
    lines = [
        "## Broken",
        "",
        "| rule | effect | what happened | seen with |",
        "|---|---|---|---|",
    ]
    for name, found in by_rule.items():
        worst = min(found, key=_severity)
        where = ", ".join(f"{each.runner} {each.roles}" for each in found)
        assert worst.effect is not None
        lines.append(f"| `{name}` | {worst.effect.value} | {_cell(worst.said)} | {where} |")
    return [*lines, ""]


def _severity(result: Result) -> int:
    assert result.effect is not None
    return list(type(result.effect)).index(result.effect)


def _table(results: Sequence[Result]) -> list[str]:
    scenes = list(dict.fromkeys((each.runner, each.roles) for each in results))
    head = " | ".join(f"{runner.upper()}, {_ROLES[roles]}" for runner, roles in scenes)
    lines = [f"| rule | {head} |", "|---|" + "---|" * len(scenes)]
    found = {(each.rule.name, each.runner, each.roles): each for each in results}
    for name in dict.fromkeys(each.rule.name for each in results):
        rows = [found.get((name, *scene)) for scene in scenes]
        rule = next(each for each in rows if each is not None).rule
        marks = " | ".join("" if each is None else _MARKS[each.verdict] for each in rows)
        lines.append(f"| {_cell(rule.sentence)} {_cell(rule.why)} `{name}` | {marks} |")
    return lines


def _notes(results: Sequence[Result]) -> list[str]:
    noted = [each for each in results if each.notes]
    if not noted:
        return []
    lines = ["## Noted", "", "No limit is set here: they are one run's times on one machine.", ""]
    for each in noted:
        lines += [f"{each.runner} {each.roles}, `{each.rule.name}`:", ""]
        lines += [f"- {note}" for note in each.notes]
        lines.append("")
    return lines


def _cell(text: str) -> str:
    """Return text that fits into a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")
