"""`weir doctor --lint`: faults of Dockerfiles, compose files, scripts, jobs and requirements, by line. Pure.

    linter.py         lint(name, content): recognises what a file is; the only entry others need
    rules.py          the rules' texts (data/rules.yaml), Fault, Checks; report.py: text, JSON and SARIF
    containers.py     a container that is started, by `docker run`, compose or a devcontainer
    compose.py        a compose service; dockerfiles.py: an instruction of a Dockerfile
    shell.py          a command, or all commands of a RUN (by shell_parser.py); pip.py: a pip request
    jobs.py           a Slurm job, an Apptainer definition; python_code.py: a call in Python code

To add a rule:
1. Write a rule function in the module of its subject, with the decorator of that module's checks
   (`@container_checks.add`): it takes the subject and yields `Fault(line, "your-rule", what_stands_there)`.
2. Describe `your-rule` in doctor/data/rules.yaml: level, title, reason, fix. Terminal, JSON, SARIF and the
   documentation take the texts from there. An id never changes its meaning.
3. Add a broken file to tests/unit/doctor/lint_broken.txt, with `⟵ your-rule` at the end of the line;
   the tests require one for each rule, and that no good file raises an alarm.
"""
