"""Credentials left in an image are found wherever they are, and never printed."""

import json

import pytest
from image_maker import Image, archive, chunks, containerd_nested, file, tar
from planted import FORMS, PASSWORD, Planted, made_up, planted

from buildtool.audit.audit import audit_image
from buildtool.audit.html import render_html
from buildtool.audit.report import AuditReport, to_json
from buildtool.audit.text import render_markdown, render_table
from buildtool.image.secrets import credentials_in_file, credentials_in_text, redacted


class FakeEngine:
    def __init__(self, image: Image) -> None:
        self._content = archive(containerd_nested(image))

    def save(self, ref: str):
        return chunks(self._content)


def audited(row: Planted) -> AuditReport:
    layers = [tar(file(row.path, row.text.encode())), tar(file("x"))] if row.path else [tar(file("x"))]
    image = Image(layers)
    if row.place == "label":
        image.labels = dict([row.text.split("=", 1)])
    if row.place == "env":
        image.env = [row.text]
    if row.place == "history":
        image.history = [{"created_by": row.text}, {"created_by": "x", "empty_layer": True}]
    if row.place == "provenance":
        image.provenance = json.loads(row.text)
    return audit_image(image.ref, engine=FakeEngine(image))


@pytest.mark.parametrize("row", planted(), ids=lambda row: row.what)
def test_a_planted_credential_is_found_and_not_reported(row: Planted) -> None:
    report = audited(row)
    finding = next(finding for finding in report.findings if finding.id == "secrets")
    assert len(finding.paths) == 1
    assert row.path in finding.paths[0]
    for text in (to_json(report), render_table(report), render_markdown(report)):
        assert row.secret not in text or row.secret == "x"


def test_a_file_that_a_later_layer_removes_is_reported_as_still_stored() -> None:
    image = Image([tar(file("root/.netrc", b"machine h password abcd1234")), tar(file("root/.wh..netrc"))])
    finding = audit_image(image.ref, engine=FakeEngine(image)).findings[0]
    assert finding.paths == (
        "root/.netrc (layer 0, gone from later layers but still stored): password in .netrc",
    )


@pytest.mark.parametrize(
    "text",
    [
        "PATH=/usr/bin",
        "GPG_KEY=E3FF2839C048B25C084DEBE9B26995E310250568",
        "PYTHON_SHA256=" + "0a" * 32,
        "TOKENIZERS_PARALLELISM=false",
        "SSH_AUTH_SOCK=/run/ssh",
        "DB_PASSWORD_FILE=/run/secrets/db",
        "API_KEY=${API_KEY}",
        "API_KEY=<your key>",
        "AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE",
        "RUN --mount=type=secret,id=token TOKEN=$(cat /run/secrets/token) make",
        "RUN git clone https://host/x.git",
        "RUN useradd --password '' x",
        "max_tokens=512000",
    ],
)
def test_what_is_no_credential_is_not_reported(text: str) -> None:
    assert credentials_in_text(text).kinds == ()
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("app/x.py", 'token = os.environ["TOKEN"]\npassword = getpass("password")\n'),
        ("app/x.py", "def login(password: str, token: str | None = None) -> None: ...\n"),
        (
            "app/tokenizer_config.json",
            '{"pad_token": "[PAD]", "model_max_length": 512, "unk_token": "<unk>"}',
        ),
        ("etc/pam.d/common-password", "password requisite pam_deny.so\n"),
        ("srv/x.yaml", "secret: null\npassword: ${PASSWORD}\n"),
        ("app/notes.txt", "-----BEGIN PRIVATE KEY-----\n...\n"),
        ("app/cert.pem", "-----BEGIN CERTIFICATE-----\n" + "A" * 300),
    ],
)
def test_a_file_without_credentials_is_not_reported(path: str, text: str) -> None:
    directory, _, name = path.encode().rpartition(b"/")
    assert credentials_in_file(directory, name, text.encode()).kinds == ()


def test_code_of_libraries_is_not_read_but_their_netrc_is() -> None:
    text = f'TOKEN = "{FORMS["github"]}"\n'.encode()
    site = "usr/lib/python3/dist-packages"
    image = Image([tar(file(f"{site}/x.py", text), file(f"{site}/.netrc", f"password {PASSWORD}".encode()))])
    [finding] = audit_image(image.ref, engine=FakeEngine(image)).findings
    assert finding.paths == (f"{site}/.netrc (layer 0): password in .netrc",)


def test_every_credential_in_a_text_is_redacted_once() -> None:
    text = f"RUN X_TOKEN={FORMS['github']} curl -u bob:{PASSWORD} https://b:{PASSWORD}@h"
    assert redacted(text) == "RUN X_TOKEN=[redacted] curl -u bob:[redacted] https://b:[redacted]@h"


NETRC = f"machine host login bob password {PASSWORD}"


@pytest.mark.parametrize(
    "command",
    [
        f'RUN /bin/sh -c echo "{NETRC}" > /root/.netrc # buildkit',
        f"RUN /bin/sh -c printf 'machine host\\nlogin bob\\npassword {PASSWORD}\\n' > /root/.netrc",
        f"RUN /bin/sh -c make-netrc bob {PASSWORD}",
    ],
)
def test_a_credential_of_a_file_is_not_repeated_by_the_command_that_wrote_it(command: str) -> None:
    """Of whatever form the command is: the file's content shows what has to be hidden everywhere."""
    image = Image([tar(file("root/.netrc", f"{NETRC}\n".encode()))], labels={"made by": command})
    image.history = [{"created_by": command}]
    report = audit_image(image.ref, engine=FakeEngine(image))
    for text in (to_json(report), render_table(report), render_markdown(report), render_html(report)):
        assert PASSWORD not in text
        assert "RUN /bin/sh -c" in text or text == render_markdown(report)


def test_a_credential_in_a_command_that_writes_a_netrc_is_found_without_the_file() -> None:
    text = f'RUN echo "{NETRC}" > .netrc && git clone https://host/x && rm .netrc'
    assert credentials_in_text(text).kinds == ("password in .netrc",)
    assert redacted(text) == text.replace(PASSWORD, "[redacted]")
    assert credentials_in_text("RUN add machine; then login, and set the password for it").kinds == ()


def test_credentials_found_anywhere_are_hidden_everywhere() -> None:
    word, rest = made_up("seen in ENV", 20), made_up("in provenance", 20)
    image = Image([tar(file("x"))], env=[f"DB_PASSWORD={word}"], labels={"a": f"<{word}>", "b": f"<{rest}>"})
    image.history = [{"created_by": f"RUN connect {word} {rest}"}]
    image.provenance = {"args": {"API_TOKEN": rest}}
    text = to_json(audit_image(image.ref, engine=FakeEngine(image)))
    assert word not in text
    assert rest not in text


def test_commands_are_hidden_whole_where_more_credentials_are_known_than_can_be_searched_for() -> None:
    known = frozenset(made_up(str(seed), 8).encode() for seed in range(501))
    assert redacted("RUN make", known) == "[redacted]"
    assert redacted("", known) == ""
    assert redacted("RUN make", frozenset(sorted(known)[:500])) == "RUN make"


def test_a_known_credential_that_cuts_through_a_character_is_no_traceback() -> None:
    assert credentials_in_file(
        b"root", b".netrc", b"password \xa9\xc3\xa9\xc3 password abc\xc3\xa9"
    ).values == {"abcé".encode()}
