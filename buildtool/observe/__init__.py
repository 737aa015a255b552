"""What a container opens, and what it may do: observed runs, and runs with less.

`runs` starts containers and a workload for each; `fanotify` and `inotify` say which files were opened;
`ablation` finds the least that a compose service needs.
"""
