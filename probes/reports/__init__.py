"""Saved reports in every form: as text, Markdown, an HTML page, metrics, and two side by side.

Start at `kinds`, the table of the kinds of reports, which the command line goes through.

- Forms: `document` (what every form is made of), `text` (terminal and Markdown), `html` with `page.css`,
  `prometheus`; `compare` has what comparisons share. `figures` writes figures with their errors.
- Plots: `palette`, `canvas` (what all matplotlib plots share), `svg` (makes them fit into a page), and
  `pictures` (of plans and fits, without matplotlib, which only the host has).
- Kinds: a run of the probes in `run`, `run_headline`, `run_findings`, `crossover`, `run_tables`,
  `run_charts`, `run_metrics` and `run_compare`; a throughput report in `scan*`; a watch in `watch*`; an
  answer of `fit` in `fit`; a plan, which isn't saved as a report but shown likewise, in `plan`.
"""
