"""What an image is made of, said to others: bills of materials, provenance, signatures.

- `binaries`: what a file says of itself: digests, and an ELF file's name, build id and versions;
  `libraries`: which library that is, by `libraries.toml`.
- `inventory`: an image's packages, the libraries inside wheels, its models, and the files that nobody owns.
- `documents`: the inventory as CycloneDX 1.6 and SPDX 2.3.
- `attest`: statements about an image, signed, as manifests that refer to it; `verify`: whether they hold.
"""
