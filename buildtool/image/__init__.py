"""Reads any container image without extracting it: what each layer holds, and what the merged tree shows.

- `archive`: an image archive, a layout directory or an engine's stream as named blobs; each is read once.
- `reader`: chooses one image among the blobs (`read_image`) and returns it as `ImageContents`.
- `documents`: the JSON of indexes, manifests, configs and manifest.json.
- `layer`: one layer's members in columns (`LayerIndex`); `merge`: layers applied on one another (`Merged`).
- `gpu_code`, `debug_info`, `secrets`: what is searched in files while they stream by.
- `tar`, `streams`: tar headers; hashing, decompressing, reading ahead.
- `written`, `layer_writer`: an image and its layers as they are written; `flatten`: all layers as one tree.
- `errors`: what can be wrong with an image (`ImageError`), and the limits of reading (`Limits`).

Others use `open_archive` or `StreamArchive`, then `read_image`, then `merge`.
"""
