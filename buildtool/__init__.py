"""`weir`, the host program: builds, audits and prunes container images, and advises. Never imports torch.

cli/       the command line: one module for each verb
core/      what all packages share: errors, files, programs, progress, the values of a build
build/     from the catalog to proved images          engine/   the Docker engine and registries
image/     reads any image: tar, layers, merged tree  audit/    what takes an image's bytes
gpucode/   formats of GPU code, and cutting them      prune/    removes GPU code for other cards
doctor/    what a host can run, and a linter
"""
