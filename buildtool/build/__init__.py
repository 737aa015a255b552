"""Builds images: from variants.yaml to images that are proved, audited and named.

    catalog.py    load(): variants.yaml as a Catalog
    sources.py    resolves a variant's inputs: the first source that answers, else the reasons
    lockfile.py   the resolved inputs, pinned by content
    wheels.py     wheels, by the host's pip (run as pip_alone.py) into a cache
    rootfs.py     Debian root file systems, by mmdebstrap into a cache
    plan.py       ImagePlan, BuildPlan and the bake file; pure
    workplace.py  the state directory that holds all of these
    pipeline.py   the steps: make_plan, stage, bake, prove, audit, record, name_all

The command line uses catalog, workplace and pipeline.
"""
