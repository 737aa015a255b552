"""Builds images: from variants.yaml to images that are proved, audited and named.

    catalog.py    load(): variants.yaml as a Catalog
    sources.py    resolves a variant's inputs: the first source that answers, else the reasons
    lockfile.py   the resolved inputs, pinned by content
    wheels.py     wheels, by the host's pip (run as pip_alone.py) into a cache
    rootfs.py     Debian root file systems, by mmdebstrap into a cache
    plan.py       ImagePlan, BuildPlan, configs and the bake file; pure
    image_writer.py, wheel_layer.py, payload.py, registry_base.py  an image's layers from its inputs
    bytecode.py   bytecode of what the service imports, by the image's own Python (compile_modules.py)
    layer_store.py  the layers and images that were written, as one OCI layout
    publish.py, squashfs.py, conda.py  where an image goes beside an engine
    runtimes.py   runs a proof where no engine is
    workplace.py  the state directory that holds all of these
    pipeline.py   the steps: make_plan, write, load (or stage, bake), prove, audit, record, name_all

The command line uses catalog, workplace and pipeline.
"""
