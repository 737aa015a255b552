"""What this machine has, read from the kernel's files, NVML and torch."""
