"""Keeps a GPU busy until it is ended: `python tests/device/hog.py copy|vram|compute`; says "ready" first."""

import sys

import torch


def main(kind: str) -> None:
    operations = []
    if kind == "copy":
        host = torch.ones(64 * 2**20, dtype=torch.int32).pin_memory()
        device = torch.empty_like(host, device="cuda")
        operations = [lambda: device.copy_(host, non_blocking=True)]
    elif kind == "vram":
        a, b = (torch.ones(256 * 2**20, dtype=torch.int32, device="cuda") for _ in range(2))
        operations = [lambda: b.copy_(a)]
    else:
        a = torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
        b = torch.empty_like(a)
        operations = [lambda: torch.mm(a, a, out=b)]
    operations[0]()
    torch.cuda.synchronize()
    print("ready", flush=True)
    while True:
        for _ in range(20):
            for operation in operations:
                operation()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
