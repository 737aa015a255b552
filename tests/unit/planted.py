"""Credentials to plant in images: made up here, of every form and place that the audit knows."""

import base64
import hashlib
import string
from collections.abc import Iterator
from dataclasses import dataclass

ALPHABET = string.ascii_letters + string.digits


def made_up(seed: str, length: int, alphabet: str = ALPHABET) -> str:
    """Text that looks random and is the same in every run. No real credential has this form by chance."""
    stream = b"".join(hashlib.sha512(f"{seed} {n}".encode()).digest() for n in range(length // 64 + 1))
    return "".join(alphabet[byte % len(alphabet)] for byte in stream[:length])


@dataclass(frozen=True)
class Planted:
    """One credential. `path` is empty for those in `env`, `history`, `label` or `provenance`."""

    what: str
    secret: str
    text: str
    path: str = ""
    place: str = "file"


def private_key(seed: str, kind: str = "OPENSSH ") -> str:
    body = base64.b64encode(made_up(seed, 700).encode()).decode()
    lines = "\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{lines}\n-----END {kind}PRIVATE KEY-----\n"


FORMS = {
    "aws": "AKIA" + made_up("aws", 16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"),
    "aws-session": "ASIA" + made_up("aws2", 16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"),
    "github": "ghp_" + made_up("gh", 36),
    "github-app": "ghs_" + made_up("ghs", 36),
    "github-fine": "github_pat_" + made_up("ghf", 60),
    "gitlab": "glpat-" + made_up("gl", 20),
    "hf": "hf_" + made_up("hf", 34),
    "slack": "xoxb-" + made_up("sl", 12, string.digits) + "-" + made_up("sl2", 24),
    "google": "AIza" + made_up("go", 35),
    "google-oauth": "GOCSPX-" + made_up("goc", 28),
    "pypi": "pypi-" + made_up("py", 120),
    "npm": "npm_" + made_up("npm", 36),
    "docker": "dckr_pat_" + made_up("do", 27),
    "pay": "sk_live_" + made_up("pay", 24),
    "model": "sk-proj-" + made_up("mo", 48),
    "mail": f"SG.{made_up('m1', 22)}.{made_up('m2', 43)}",
    "vault": "hvs." + made_up("va", 24),
    "jwt": f"eyJ{made_up('j1', 30)}.eyJ{made_up('j2', 60)}.{made_up('j3', 43)}",
}
PASSWORD = made_up("password", 14)


def _files() -> Iterator[tuple[str, str, str, str]]:
    """What, path, secret, text."""
    for name, value in FORMS.items():
        yield f"{name} in a settings file", f"app/{name}.env", value, f"DEBUG=1\nKEY_ID={value}\n"
    yield "netrc", "root/.netrc", PASSWORD, f"machine host login bob password {PASSWORD}\n"
    yield "netrc of a user", "home/u/_netrc", PASSWORD, f"machine host\n  login bob\n  password {PASSWORD}\n"
    yield "pip.conf", "etc/pip.conf", PASSWORD, f"[global]\nindex-url = https://bob:{PASSWORD}@host/simple\n"
    yield (
        "pip's user file",
        "root/.config/pip/pip.conf",
        PASSWORD,
        f"[global]\nextra-index-url=https://b:{PASSWORD}@h/s\n",
    )
    yield ".pypirc", "root/.pypirc", PASSWORD, f"[pypi]\nusername = bob\npassword = {PASSWORD}\n"
    auth = base64.b64encode(f"bob:{PASSWORD}".encode()).decode()
    yield "docker", "root/.docker/config.json", auth, f'{{"auths": {{"host": {{"auth": "{auth}"}}}}}}'
    yield "npmrc", "app/.npmrc", PASSWORD, f"//host/:_authToken={PASSWORD}\n"
    yield "git", "root/.git-credentials", PASSWORD, f"https://bob:{PASSWORD}@host\n"
    yield (
        "git remote",
        "app/.git/config",
        PASSWORD,
        f'[remote "o"]\n\turl = https://bob:{PASSWORD}@host/x.git\n',
    )
    aws = made_up("awss", 40)
    yield "AWS", "root/.aws/credentials", aws, f"[default]\naws_secret_access_key = {aws}\n"
    yield "pgpass", "root/.pgpass", PASSWORD, f"host:5432:db:bob:{PASSWORD}\n"
    yield "my.cnf", "root/.my.cnf", PASSWORD, f"[client]\npassword={PASSWORD}\n"
    yield "htpasswd", "srv/.htpasswd", "$apr1$" + PASSWORD, f"bob:$apr1${PASSWORD}\n"
    yield "shadow", "etc/shadow", f"$6$x${PASSWORD}", f"root:*:1::::::\nbob:$6$x${PASSWORD}:1::::::\n"
    yield "dotenv", "app/.env", PASSWORD, f"export DB_PASSWORD='{PASSWORD}'\n"
    yield "settings in Python", "app/settings.py", PASSWORD, f'DEBUG = False\nSECRET_KEY = "{PASSWORD}"\n'
    yield "settings in JSON", "app/config.json", PASSWORD, f'{{"db": {{"password": "{PASSWORD}"}}}}'
    yield "settings in YAML", "srv/config.yaml", PASSWORD, f"db:\n  password: {PASSWORD}\n"
    yield "settings in TOML", "srv/x.toml", PASSWORD, f'api_key = "{PASSWORD}"\n'
    yield "shell script", "app/run.sh", PASSWORD, f"#!/bin/sh\nexport API_TOKEN={PASSWORD}\nexec x\n"
    yield "shell history", "root/.bash_history", PASSWORD, f"ls\ncurl -u bob:{PASSWORD} https://host\n"
    yield (
        "kubeconfig",
        "root/.kube/config",
        made_up("k", 80),
        f"users:\n- user:\n    client-key-data: {made_up('k', 80)}\n",
    )
    yield (
        "service account",
        "app/sa.json",
        "x",
        '{"private_key": "' + private_key("sa", "").replace("\n", "\\n") + '"}',
    )
    kaggle = made_up("kg", 32, "0123456789abcdef")
    yield "kaggle", "root/.kaggle/kaggle.json", kaggle, f'{{"username":"bob","key":"{kaggle}"}}'
    yield "rclone", "root/.config/rclone/rclone.conf", PASSWORD, f"[s3]\ntype = s3\npass = {PASSWORD}\n"
    hook = f"T{made_up('h1', 8)}/B{made_up('h2', 8)}/{made_up('h3', 24)}"
    yield "webhook", "app/notify.sh", hook, f"curl -d x https://hooks.slack.com/services/{hook}\n"
    azure = made_up("az", 86)
    yield (
        "Azure",
        "app/storage.txt",
        azure,
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={azure}==\n",
    )
    for kind, name in (("OPENSSH ", "id_ed25519"), ("RSA ", "id_rsa"), ("EC ", "id_ecdsa"), ("", "tls.key")):
        yield f"key {name}", f"root/.ssh/{name}", private_key(name, kind)[60:120], private_key(name, kind)


def planted() -> tuple[Planted, ...]:
    """All of them: in files, ENV, labels, history and provenance."""
    rows = [Planted(what, secret, text, path) for what, path, secret, text in _files()]
    rows += [
        Planted("ENV by form", FORMS["hf"], f"X={FORMS['hf']}", place="env"),
        Planted("ENV by name", PASSWORD, f"DB_PASSWORD={PASSWORD}", place="env"),
        Planted("ENV with a URL", PASSWORD, f"DATABASE_URL=postgres://bob:{PASSWORD}@db/x", place="env"),
        Planted("label by name", PASSWORD, f"com.host.api_key={PASSWORD}", place="label"),
        Planted("label by form", FORMS["github"], f"source={FORMS['github']}", place="label"),
        Planted("ARG's default", PASSWORD, f"ARG TOKEN={PASSWORD}", place="history"),
        Planted("ARG of a RUN", PASSWORD, f"RUN |1 NPM_TOKEN={PASSWORD} /bin/sh -c make", place="history"),
        Planted(
            "pip with a URL", PASSWORD, f"RUN pip install -i https://b:{PASSWORD}@h/s x", place="history"
        ),
        Planted(
            "curl's header",
            FORMS["jwt"],
            f'RUN curl -H "Authorization: Bearer {FORMS["jwt"]}" h',
            place="history",
        ),
        Planted(
            "build argument",
            PASSWORD,
            f'{{"args": {{"build-arg:API_TOKEN": "{PASSWORD}"}}}}',
            place="provenance",
        ),
        Planted("password option", PASSWORD, f"RUN login --password {PASSWORD} host", place="history"),
    ]
    return tuple(rows)
