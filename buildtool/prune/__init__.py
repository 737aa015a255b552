"""Removes GPU code for other cards from files, directory trees, archives and images.

- `trees`: one file (`prune_file`) and directory trees (`prune_tree`).
- `archives`: a root file system's tar and wheels, as streams (`prune_tar`, `prune_wheel`).
- `images`: an image in the engine (`prune_image`); `flat_image`: the one-layer image that it makes.
- `inputs`: a build's inputs, pruned and cached by content and targets.
- `manifest`: what prunes removed, as a value (`TreeResult`) and as the list that is kept with a tree.
"""
