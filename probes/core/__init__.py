"""What both programs are built on; imports nothing of ours, and the standard library only.

entry: signals, failures and exit codes around a command line. errors: every failure of the probes.
output: standard output and error. quoting: text from outside, for the place where it is shown.
codec: dataclasses to JSON and back. files: files written whole or not at all. units: quantities as text.
unknown: a figure that couldn't be determined. invocation: the commands that hints name.
"""
