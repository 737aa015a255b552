"""The linter's faults as text, JSON and SARIF. Pure."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from buildtool.core.sarif import SarifTool, fitting_results, sarif_document
from buildtool.doctor.lint.rules import Fault, Rule
from probes.core.codec import Json
from probes.core.quoting import sarif, terminal
from probes.core.units import counted

FileFaults = tuple[str, Sequence[Fault]]  # a file's name and its faults


def lint_text(files: Sequence[FileFaults], rules: Mapping[str, Rule]) -> str:
    """A paragraph for each fault; the last line counts them."""
    lines = [text for name, faults in files for fault in faults for text in _paragraph(name, fault, rules)]
    count = sum(len(faults) for _, faults in files)
    n_faulty = len([name for name, faults in files if faults])
    all_files = counted(len(files), "file")
    summary = (
        f"{counted(count, 'fault')} in {n_faulty} of {all_files}" if count else f"no faults in {all_files}"
    )
    return "\n".join([*lines, summary])


def _paragraph(name: str, fault: Fault, rules: Mapping[str, Rule]) -> Iterator[str]:
    rule = rules[fault.rule]
    yield f"{name}:{fault.line}: {rule.level}: {rule.title} [{fault.rule}]: {fault.detail}"
    yield f"  why: {rule.reason}"
    yield f"  fix: {rule.fix}"


def lint_json(files: Sequence[FileFaults], rules: Mapping[str, Rule]) -> list[Json]:
    """One object for each fault."""
    return [
        {
            "file": name,
            "line": fault.line,
            "rule": fault.rule,
            "level": rules[fault.rule].level,
            "title": rules[fault.rule].title,
            "detail": fault.detail,
            "reason": rules[fault.rule].reason,
            "fix": rules[fault.rule].fix,
        }
        for name, faults in files
        for fault in faults
    ]


def lint_sarif(files: Sequence[FileFaults], rules: Mapping[str, Rule], *, version: str) -> str:
    """SARIF 2.1.0, within what code scanning accepts."""
    pairs = [(name, fault) for name, faults in files for fault in faults]
    used = sorted({fault.rule for _, fault in pairs})
    kept = fitting_results([_result(name, fault, rules, used=used) for name, fault in pairs])
    shown: list[Json] = [_rule(name, rules[name]) for name in used]
    return sarif_document(
        SarifTool("gpu-weir doctor", version, shown), kept, left_out=len(pairs) - len(kept), bases={}
    )


def _rule(name: str, rule: Rule) -> Json:
    return {
        "id": name,
        "shortDescription": {"text": sarif(rule.title)},
        "fullDescription": {"text": sarif(rule.reason)},
        "help": {"text": sarif(rule.fix)},
        "defaultConfiguration": {"level": rule.level},
    }


def _result(name: str, fault: Fault, rules: Mapping[str, Rule], *, used: Sequence[str]) -> dict[str, Json]:
    rule = rules[fault.rule]
    identity = terminal(f"{name}\n{fault.rule}\n{fault.detail}", keep="\n")
    return {
        "ruleId": fault.rule,
        "ruleIndex": used.index(fault.rule),
        "level": rule.level,
        "message": {"text": sarif(f"{rule.title}: {fault.detail}\n\n{rule.reason}\n\n{rule.fix}")},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(terminal(name))},
                    "region": {"startLine": fault.line},
                }
            }
        ],
        "partialFingerprints": {"weirFault/v1": hashlib.sha256(identity.encode()).hexdigest()},
    }
