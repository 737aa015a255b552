"""Says where an image's bytes are and which of them are waste.

- `audit`: from end to end (`audit_source`, `audit_image`, `audit_path`); `options`: what a caller chooses.
- `counts`: every byte with its owner, kind, layer and visibility (`gather_facts`). It uses `kinds`
  (what a path holds), `packages` (who owns a file), `claims` (which findings remove a byte) and `treemap`.
- `findings`: waste by cause, with the remedy. Each check is a function from `Facts` to a finding, in CHECKS.
- `report`: the result as one value (`AuditReport`), its JSON, and the verdict on the budget.
- `baseline`, `diff`: two reports compared, for CI and for people.
- `formats`: the table of report formats; their renderers are in `text`, `html`, `sarif` and `junit`.
"""
