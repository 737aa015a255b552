"""The file formats that hold GPU code: ELF, bundles, compressed bundles, CUDA fat binaries."""
