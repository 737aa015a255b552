"""Good files in the shapes of official images' Dockerfiles, published compose files, jobs and requirements.

Shapes are rebuilt in our own words; each is varied over releases, bases and packages, as official images are.
"""

import itertools
from collections.abc import Iterator

DEBIANS = ("bookworm-slim", "trixie-slim", "bookworm", "bullseye-slim")
ALPINES = ("3.20", "3.21", "3.22")
UBUNTUS = ("22.04", "24.04", "26.04")

# a language runtime built from source on Debian: build packages are purged again in the same RUN
RUNTIME = r"""# NOTE: generated from a template; edit that instead
FROM debian:{base}

ENV PATH /usr/local/bin:$PATH
ENV LANG C.UTF-8
ENV LANGUAGE_VERSION {version}
ENV GPG_KEYS 0123456789ABCDEF0123456789ABCDEF01234567

RUN set -eux; \
	savedAptMark="$(apt-mark showmanual)"; \
	apt-get update; \
	apt-get install -y --no-install-recommends \
		ca-certificates \
		wget \
# needed for the signature
		gnupg dirmngr \
		{packages} \
	; \
	wget -O source.tar.xz "https://example.org/v${{LANGUAGE_VERSION%%[a-z]*}}/source.tar.xz"; \
	GNUPGHOME="$(mktemp -d)"; export GNUPGHOME; \
	gpg --batch --keyserver hkps://keys.openpgp.org --recv-keys "$GPG_KEYS"; \
	gpg --batch --verify source.tar.xz.asc source.tar.xz; \
	mkdir -p /usr/src/language; \
	tar --extract --directory /usr/src/language --strip-components=1 --file source.tar.xz; \
	rm source.tar.xz; \
	cd /usr/src/language; \
	gnuArch="$(dpkg-architecture --query DEB_BUILD_GNU_TYPE)"; \
	./configure --build="$gnuArch" --enable-shared; \
	nproc="$(nproc)"; \
	make -j "$nproc"; \
	make install; \
	cd /; \
	rm -rf /usr/src/language; \
	find /usr/local -depth \( -type d -a \( -name test -o -name tests \) \) -exec rm -rf '{{}}' +; \
	ldconfig; \
	apt-mark auto '.*' > /dev/null; \
	apt-mark manual $savedAptMark; \
	apt-get purge -y --auto-remove -o APT::AutoRemove::RecommendsImportant=false; \
	rm -rf /var/lib/apt/lists/*; \
	language --version

RUN set -eux; for src in idle3 pip3; do ln -svT "$src" "/usr/local/bin/$(basename "$src" 3)"; done
CMD ["language"]
"""

# a server on Debian: own user, gosu checked by signature, an entrypoint
SERVER = r"""FROM debian:{base}

RUN groupadd -r server --gid=999; \
	useradd -r -g server --uid=999 --home-dir=/var/lib/server --shell=/bin/bash server; \
	install --verbose --directory --owner server --group server --mode 1777 /var/lib/server

ENV GOSU_VERSION {version}
RUN set -eux; \
	apt-get update && apt-get install -y --no-install-recommends ca-certificates wget {packages}; \
	rm -rf /var/lib/apt/lists/*; \
	dpkgArch="$(dpkg --print-architecture | awk -F- '{{ print $NF }}')"; \
	wget -O /usr/local/bin/gosu "https://example.org/gosu-$dpkgArch"; \
	case "$dpkgArch" in amd64) sum='aa' ;; arm64) sum='bb' ;; *) echo >&2 "unsupported"; exit 1 ;; esac; \
	echo "$sum  /usr/local/bin/gosu" | sha256sum -c -; \
	chmod +x /usr/local/bin/gosu; \
	gosu nobody true

VOLUME /var/lib/server
COPY docker-entrypoint.sh /usr/local/bin/
ENTRYPOINT ["docker-entrypoint.sh"]
STOPSIGNAL SIGINT
EXPOSE {port}
CMD ["server", "--port", "{port}"]
"""

ALPINE_SERVER = r"""FROM alpine:{base}
RUN addgroup -S -g 1000 cache && adduser -S -G cache -u 999 cache
ENV DOWNLOAD_URL https://example.org/releases/cache-{version}.tar.gz
ENV DOWNLOAD_SHA 5281f44dc8d84e3c1ed3d8f5d8cd1d2c26b2d1f9e9d2a9c0b9d1e5a1f0a0b0c0
RUN set -eux; \
	apk add --no-cache --virtual .build-deps coreutils gcc linux-headers make musl-dev {packages}; \
	wget -O cache.tar.gz "$DOWNLOAD_URL"; \
	echo "$DOWNLOAD_SHA *cache.tar.gz" | sha256sum -c -; \
	mkdir -p /usr/src/cache; tar -xzf cache.tar.gz -C /usr/src/cache --strip-components=1; \
	make -C /usr/src/cache -j "$(nproc)" all install; \
	rm -r /usr/src/cache cache.tar.gz; \
	apk add --no-network --virtual .cache-rundeps so:libc.musl.so; \
	apk del --no-network .build-deps
RUN mkdir /data && chown cache:cache /data
VOLUME /data
WORKDIR /data
EXPOSE {port}
CMD ["cache-server"]
"""

GO = r"""# syntax=docker/dockerfile:1
FROM --platform=$BUILDPLATFORM golang:{version}-alpine AS build
ARG TARGETOS TARGETARCH
WORKDIR /src
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=bind,source=go.sum,target=go.sum go mod download -x
RUN --mount=type=cache,target=/root/.cache/go-build <<EOT
set -e
CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -o /bin/{packages} ./cmd
EOT

FROM {base}
COPY --from=build /bin/{packages} /bin/
USER 65532:65532
ENTRYPOINT ["/bin/{packages}"]
"""

NODE = r"""FROM node:{version} AS deps
WORKDIR /app
COPY package.json package-lock.json ./
RUN npm ci --omit=dev && npm cache clean --force

FROM node:{version}
ENV NODE_ENV=production TOKENIZER_PATH=/models/tokenizer.json
WORKDIR /app
COPY --from=deps --chown=node:node /app/node_modules ./node_modules
COPY --chown=node:node . .
USER node
EXPOSE {port}
HEALTHCHECK --interval=30s CMD wget -qO- http://127.0.0.1:{port}/healthz || exit 1
CMD ["node", "server.js"]
"""

TORCH_CPU = r"""FROM python:{version}
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY requirements.txt .
RUN pip install torch=={torch} --index-url https://download.pytorch.org/whl/cpu \
 && pip install -r requirements.txt
COPY --chown=10001:10001 . .
USER 10001
CMD ["python", "-m", "service"]
"""

TORCH_GPU = r"""# syntax=docker/dockerfile:1.7
ARG BASE={base}
FROM ${{BASE}} AS build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv python3-pip git \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN --mount=type=cache,target=/root/.cache/pip pip install torch=={torch} --index-url {index}
RUN --mount=type=cache,target=/root/.cache/pip pip install -r https://example.org/requirements.txt
RUN python3 - <<'PY'
import torch
print(torch.__version__, torch.device("cuda"))
PY

FROM ${{BASE}}
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["python3", "-m", "serve"]
"""

COMPOSE_WEB = """name: {packages}
services:
  web:
    build: .
    image: registry.example/{packages}-web:{version}
    restart: unless-stopped
    depends_on:
      db: {{ condition: service_healthy }}
    environment: &env
      DATABASE_URL: postgres://db/{packages}
      LOG_LEVEL: ${{LOG_LEVEL:-info}}
    ports: ["127.0.0.1:{port}:8000"]
    read_only: true
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    tmpfs: [/tmp]
  worker:
    image: registry.example/{packages}-web:{version}
    command: [python, -m, worker]
    environment:
      <<: *env
      QUEUE: default
    deploy: {{ replicas: 2, resources: {{ limits: {{ memory: 512M }} }} }}
  db:
    image: postgres:{base}
    volumes: [data:/var/lib/postgresql/data]
    healthcheck: {{ test: [CMD-SHELL, "pg_isready -U postgres"], interval: 5s }}
volumes:
  data:
"""

COMPOSE_GPU = """services:
  llm:
    image: {base}
    devices: [/dev/kfd, "/dev/dri/renderD{port}"]
    group_add: ["{version}", "44"]
    shm_size: 8g
    environment:
      HSA_OVERRIDE_GFX_VERSION: ${{HSA_OVERRIDE_GFX_VERSION:-}}
      HF_HOME: /models
    volumes: ["{packages}:/models:ro"]
"""

COMPOSE_NVIDIA = """services:
  llm:
    image: {base}
    ipc: host
    command: ["--model", "/models/{packages}", "--port", "{port}"]
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              count: {version}
              capabilities: [gpu]
"""

SLURM = """#!/bin/bash
#SBATCH --job-name={packages}
#SBATCH --nodes={version}
#SBATCH --gres=gpu:{port}
#SBATCH --ntasks-per-node=1
#SBATCH --mem=96g
#SBATCH --time=0-02:00:00

set -euo pipefail
module load {base}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node={port} train_{packages}.py
srun apptainer exec --rocm --bind "$SCRATCH:/mnt" {base}_rocm7.sif python evaluate.py
"""

APPTAINER = """Bootstrap: docker
From: {base}

%files
    requirements.txt /opt/requirements.txt

%post
    export PIP_NO_CACHE_DIR=1
    apt-get update
    apt-get install -y --no-install-recommends {packages}
    rm -rf /var/lib/apt/lists/*
    python3 -m pip install -r /opt/requirements.txt

%environment
    export LC_ALL=C.UTF-8 APP_PORT={port}

%runscript
    exec python3 -m {packages} "$@"
"""

REQUIREMENTS = """# what the service needs
--index-url https://mirror.example/simple
torch=={torch}+{base}
torchvision=={vision}+{base} ; platform_system == "Linux"
transformers>=4.{port},<6
{packages}[extra]~={version}
numpy>=1.26 \\
    --hash=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
-r base.txt
git+https://example.org/tool.git@v1.0#egg=tool
"""

DEVCONTAINER = """// For format details, see the documentation.
{{
	"name": "{packages}",
	"image": "mcr.microsoft.com/devcontainers/python:{version}-{base}",
	"features": {{ "ghcr.io/devcontainers/features/node:1": {{}} }},
	/* ports that are forwarded */
	"forwardPorts": [{port}],
	"runArgs": ["--init", "--name", "dev-{packages}"],
	"postCreateCommand": "pip install --user -r requirements.txt",
	"customizations": {{ "vscode": {{ "extensions": ["ms-python.python",], }} }},
}}
"""

SCRIPT = r"""#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
image=${{IMAGE:-{base}}}
gid=$(stat -c %g /dev/kfd)
args=(--rm --init)
if [[ -t 0 ]]; then args+=(-it); fi
for node in /dev/dri/renderD*; do
  [ -e "$node" ] || continue
  args+=(--device "$node")
done
# the groups' numbers are the host's
docker run "${{args[@]}}" --device /dev/kfd --device "$node" --group-add "$gid" \
  --shm-size {port}g -v "$PWD:/work" -w /work "$image" \
  python3 -c 'import torch; print(torch.cuda.is_available(), torch.device("cuda"))' "$@"
sudo usermod -aG render,video "$USER"
python3 -m pip install --user "torch=={torch}" --index-url https://download.pytorch.org/whl/{packages}
cat <<EOF >"$HOME/.{version}rc"
export HIP_VISIBLE_DEVICES=0
EOF
"""

Row = dict[str, str]


def rows(**columns: tuple[str, ...]) -> Iterator[Row]:
    """Every combination of the columns."""
    for values in itertools.product(*columns.values()):
        yield dict(zip(columns, values, strict=True))


def good() -> list[tuple[str, str]]:
    """Name and text of every good file."""
    rocm = "https://download.pytorch.org/whl/rocm"
    cuda = "https://download.pytorch.org/whl/cu"
    shapes: list[tuple[str, str, list[Row]]] = [
        (
            "Dockerfile",
            RUNTIME,
            [
                *rows(
                    base=DEBIANS,
                    version=("3.13.9", "4.5.1", "8.4.14", "1.29.0"),
                    packages=("libbz2-dev libffi-dev", "autoconf bison"),
                )
            ],
        ),
        (
            "Dockerfile",
            SERVER,
            [
                *rows(
                    base=DEBIANS,
                    version=("1.17", "1.19"),
                    packages=("locales", "libnss-wrapper xz-utils zstd", "procps jq"),
                    port=("5432", "27017"),
                )
            ],
        ),
        (
            "Dockerfile",
            ALPINE_SERVER,
            [
                *rows(
                    base=ALPINES,
                    version=("7.4.6", "8.2.2"),
                    packages=("openssl-dev", "perl"),
                    port=("6379", "11211"),
                )
            ],
        ),
        (
            "Dockerfile",
            GO,
            [
                *rows(
                    base=(
                        "scratch",
                        "alpine:3.22",
                        "gcr.io/distroless/static-debian12:nonroot",
                        "debian:trixie-slim",
                    ),
                    version=("1.24", "1.25.3"),
                    packages=("caddy", "traefik"),
                )
            ],
        ),
        (
            "Dockerfile",
            NODE,
            [*rows(version=("22-bookworm-slim", "24-alpine3.22", "20.19-slim"), port=("3000", "8080"))],
        ),
        (
            "Dockerfile",
            TORCH_CPU,
            [
                *rows(
                    version=("3.11-slim", "3.12-slim-bookworm", "3.13-slim"),
                    torch=("2.9.1", "2.13.0", "2.10.0+cpu"),
                )
            ],
        ),
        (
            "Dockerfile",
            TORCH_GPU,
            [
                {"base": "rocm/dev-ubuntu-24.04:6.4", "torch": "2.9.1", "index": rocm + "6.4"},
                {"base": "rocm/dev-ubuntu-24.04:7.2-complete", "torch": "2.13.0", "index": rocm + "7.2"},
                {"base": "ubuntu:24.04", "torch": "2.7.1", "index": rocm + "6.3"},
                {
                    "base": "nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04",
                    "torch": "2.10.0",
                    "index": cuda + "128",
                },
                {"base": "nvidia/cuda:13.0.1-runtime-ubuntu24.04", "torch": "2.14.0", "index": cuda + "130"},
                {"base": "debian:trixie-slim", "torch": "2.14.0", "index": cuda + "126"},
            ],
        ),
        (
            "compose.yaml",
            COMPOSE_WEB,
            [
                *rows(
                    base=("17-alpine", "18.1"),
                    version=("1.4.2", "2.0"),
                    packages=("shop", "wiki"),
                    port=("8000", "9090"),
                )
            ],
        ),
        (
            "compose.yaml",
            COMPOSE_GPU,
            [
                *rows(
                    base=("rocm/vllm:rocm7.0_vllm_0.11", "ollama/ollama:0.12.3-rocm"),
                    version=("993", "109"),
                    packages=("models", "./weights"),
                    port=("128", "129"),
                )
            ],
        ),
        (
            "compose.yaml",
            COMPOSE_NVIDIA,
            [
                *rows(
                    base=("vllm/vllm-openai:v0.11.0", "nvcr.io/nvidia/pytorch:25.10-py3"),
                    version=("1", "all"),
                    packages=("llama",),
                    port=("8000",),
                )
            ],
        ),
        (
            "job.sbatch",
            SLURM,
            [
                *rows(
                    base=("rocm/6.3", "rocm/7.2"),
                    version=("1", "5"),
                    packages=("mnist", "bert"),
                    port=("4", "8"),
                )
            ],
        ),
        (
            "image.def",
            APPTAINER,
            [
                *rows(
                    base=("python:3.12-slim", "ubuntu:24.04", "rocm/dev-ubuntu-24.04:7.2"),
                    packages=("git", "curl"),
                    port=("80",),
                )
            ],
        ),
        (
            "requirements.txt",
            REQUIREMENTS,
            [
                {
                    "base": base,
                    "torch": torch,
                    "vision": vision,
                    "packages": package,
                    "version": "1.2",
                    "port": "57",
                }
                for base, torch, vision in (
                    ("cpu", "2.9.1", "0.24.1"),
                    ("rocm7.2", "2.13.0", "0.28.0"),
                    ("cu130", "2.11.0", "0.26.0"),
                )
                for package in ("uvicorn", "accelerate", "datasets")
            ],
        ),
        (
            ".devcontainer/devcontainer.json",
            DEVCONTAINER,
            [
                *rows(
                    base=("bookworm", "trixie"),
                    version=("3.12", "3.13"),
                    packages=("api", "docs"),
                    port=("8000",),
                )
            ],
        ),
        (
            "run.sh",
            SCRIPT,
            [
                *rows(
                    base=("rocm/pytorch:rocm7.2_ubuntu24.04_py3.12_pytorch_release_2.9.1",),
                    version=("app", "tool"),
                    packages=("rocm6.4", "cpu"),
                    port=("8", "16"),
                    torch=("2.9.1",),
                )
            ],
        ),
    ]
    return [
        (f"{number:02}-{index:02}/{name}", text.format(**row))
        for number, (name, text, table) in enumerate(shapes)
        for index, row in enumerate(table)
    ]
