"""Every form of credential that the audit knows, and what surrounds one, at its exact limits."""

import pytest
from planted import made_up, private_key

from buildtool.image.secrets import (
    SCANNED_BYTES,
    SearchScope,
    credentials_in_document,
    credentials_in_file,
    credentials_in_text,
    redacted,
    search_scope,
    should_search,
)

HEX = "0123456789abcdef"
DIGITS_OF_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
PASSWORD = made_up("forms", 14)
BY_NAME = "value of a name such as PASSWORD or TOKEN"


def token(prefix: str, length: int, alphabet: str | None = None) -> str:
    return prefix + (made_up(prefix, length, alphabet) if alphabet else made_up(prefix, length))


# kind, and the credentials in it: what their issuers publish about the form
FORMS = [
    *(("AWS access key", token(prefix, 16, DIGITS_OF_BASE32)) for prefix in ("AKIA", "ASIA")),
    *(("GitHub token", token(prefix, 36)) for prefix in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    ("GitHub token", token("github_pat_", 22)),
    *(("GitLab token", token(prefix, 20)) for prefix in ("glpat-", "gldt-", "glrt-")),
    ("Hugging Face token", token("hf_", 34)),
    *(("Slack token", token(f"xox{letter}-", 24)) for letter in "abeoprs"),
    ("Slack webhook", "https://hooks.slack.com/services/T0AB1/B0CD2/" + made_up("hook", 24)),
    ("Google API key", token("AIza", 35)),
    ("Google OAuth secret", token("GOCSPX-", 28)),
    ("Google OAuth secret", token("1//0", 40)),
    ("Google OAuth secret", token("ya29.", 60)),
    ("package index token", token("pypi-", 60)),
    ("package index token", token("npm_", 36)),
    ("Docker token", token("dckr_pat_", 27)),
    ("Docker token", token("dckr_oat_", 27)),
    ("payment API key", token("sk_live_", 24)),
    ("payment API key", token("rk_live_", 24)),
    *(("model API key", token(prefix, 40)) for prefix in ("sk-", "sk-proj-", "sk-ant-", "sk-or-")),
    ("mail API key", f"SG.{made_up('sg1', 22)}.{made_up('sg2', 43)}"),
    ("Vault token", token("hvs.", 24)),
    ("Vault token", token("hvb.", 24)),
    ("Azure storage key", f"AccountKey={made_up('az', 86)}=="),
    ("JSON web token", f"eyJ{made_up('a', 20)}.eyJ{made_up('b', 20)}.{made_up('c', 20)}"),
    *(("private key", private_key("k", kind)) for kind in ("", "RSA ", "OPENSSH ", "ENCRYPTED ")),
    ("private key", private_key("pgp", "PGP ").replace("KEY-----", "KEY BLOCK-----")),
    ("password in a URL", f"postgres://bob:{PASSWORD}@db/x"),
    ("HTTP authorization", f"Authorization: Bearer {PASSWORD}"),
    ("HTTP authorization", f"authorization=basic {PASSWORD}"),
    ("HTTP authorization", f"AUTHORIZATION: Token {PASSWORD}"),
    ("registry login", f'{{"auth": "{PASSWORD}"}}'),
    ("registry login", f'{{"identitytoken" : "{PASSWORD}"}}'),
    *(
        ("password option", f"login --{name} {PASSWORD}")
        for name in ("password", "passwd", "token", "api-key", "apikey", "SECRET")
    ),
    ("password option", f"login -password={PASSWORD}"),
    *(
        ("login option", f"{client} {option}bob:{PASSWORD}")
        for client in ("curl", "wget", "twine")
        for option in ("-u ", "-u", "--user ", "--user=")
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "text"), FORMS)
def test_each_published_form_of_a_credential_is_found_wherever_it_is(kind: str, text: str) -> None:
    assert kind in credentials_in_text(f"see {text}\n").kinds
    assert kind in credentials_in_document(f"see {text}\n".encode()).kinds
    assert kind in credentials_in_file(b"etc", b"notes", f"see {text}\n".encode()).kinds
    assert PASSWORD not in redacted(f"see {text}\n")


def test_the_value_of_each_name_that_means_a_credential_is_found() -> None:
    names = (
        "PASSWORD db_passwd Passphrase my-secret TOKEN API_KEY apikey access_key AccessKey private_key"
        " AUTHKEY npm_auth credential CREDENTIALS token_value secret2"
    )
    for name in names.split():
        assert credentials_in_text(f"{name}={PASSWORD}").kinds == (BY_NAME,), name
        assert credentials_in_document(f'{{"{name}": "{PASSWORD}"}}'.encode()).kinds == (BY_NAME,), name
        assert credentials_in_file(b"srv", b"x.ini", f"{name} = {PASSWORD}\n".encode()).kinds == (BY_NAME,), (
            name
        )


def test_a_name_that_speaks_of_something_around_a_credential_has_none() -> None:
    ends = (
        "_FILE _path DIR _URL URI _name _ttl TYPE _id _ids _expires _length LIMIT _max MIN _size _header"
        " _prefix _env _count _sock _mode _class _policy _enabled _required _parallelism _provider manager"
        " _store _helper"
    )
    assert [end for end in ends.split() if credentials_in_text(f"SECRET{end}={PASSWORD}").kinds] == []


def test_a_name_that_only_resembles_that_of_a_credential_has_none() -> None:
    names = ("tokens", "tokenizer", "monkey", "KEY", "author", "pass")
    assert [name for name in names if credentials_in_text(f"{name}={PASSWORD}").kinds] == []


PLACEHOLDERS = (
    "my-EXAMPLE-1 placeholder1 change_me1 ChangeMe1 yourkey1 dummy123 [redacted] xxxx1234 ab***cde abc...de"
    " none null true False test password passwd secret token pass user default required optional disabled"
    " enabled string str 12345678 ab<cd>ef a{b}cdef %VALUE1 /run/x12 ~/secret1 @file123"
)


def test_what_represents_a_credential_is_none() -> None:
    assert [
        value for value in (*PLACEHOLDERS.split(), "$VALUE1") if credentials_in_text(f"TOKEN={value}").kinds
    ] == []
    netrc = [f"password {value}".encode() for value in PLACEHOLDERS.split()]
    assert [text for text in netrc if credentials_in_file(b"root", b".netrc", text).kinds] == []
    assert credentials_in_file(b"root", b".netrc", b"password $ecret12").kinds == ("password in .netrc",)


def test_what_only_begins_like_a_placeholder_is_a_credential() -> None:
    values = ("123456789", "testing1", "nonexx1", "trueblue")
    assert [value for value in values if credentials_in_text(f"TOKEN={value}").kinds != (BY_NAME,)] == []


def test_a_placeholder_is_looked_for_in_the_first_100_bytes_of_a_value() -> None:
    for text in ("A_TOKEN={}", "db://bob:{}@host", "login --secret {}"):
        assert credentials_in_text(text.format(made_up("long", 93) + "example")).kinds == ()
        assert len(credentials_in_text(text.format(made_up("long", 94) + "example" + "x")).kinds) == 1
    netrc = b"password %s"
    assert (
        credentials_in_file(b"", b".netrc", netrc % (made_up("long", 93).encode() + b"example")).kinds == ()
    )
    assert (
        len(credentials_in_file(b"", b".netrc", netrc % (made_up("long", 94).encode() + b"example")).kinds)
        == 1
    )


def test_a_value_of_three_characters_over_and_over_is_a_placeholder() -> None:
    assert credentials_in_text("db://bob:abcabcabc@host").kinds == ()
    assert credentials_in_text("db://bob:abcdabcd@host").kinds == ("password in a URL",)


def test_a_credential_behind_a_placeholder_is_found() -> None:
    assert credentials_in_text(f"a://b:example@h a://b:{PASSWORD}@h").kinds == ("password in a URL",)
    assert credentials_in_text(f"A_TOKEN=abc B_TOKEN={PASSWORD}").kinds == (BY_NAME,)
    assert credentials_in_text(f"A_TOKEN='abcdef\" B_TOKEN={PASSWORD}").kinds == (BY_NAME,)


@pytest.mark.parametrize("end", " \n\"';|&")
def test_a_value_in_a_shell_ends_where_the_shell_ends_it(end: str) -> None:
    assert redacted(f"A_TOKEN=ab1{end}x") == f"A_TOKEN=ab1{end}x"
    assert redacted(f"A_TOKEN=ab12{end}x") == f"A_TOKEN=[redacted]{end}x"


def test_a_quoted_value_ends_at_its_own_quote() -> None:
    assert redacted("A_TOKEN='abcd12' x") == "A_TOKEN='[redacted]' x"
    assert redacted("A_TOKEN='abcd12\" x") == "A_TOKEN='abcd12\" x"


@pytest.mark.parametrize("end", [*" \t\n\"'()[]{}"])
def test_a_value_in_code_is_a_quoted_text_of_at_least_six_characters(end: str) -> None:
    assert credentials_in_document(b'"token": "abc123"').kinds == (BY_NAME,)
    assert credentials_in_document(b"conf['token'] = 'abc123'").kinds == (BY_NAME,)
    assert credentials_in_document(b'"token": "abc12"').kinds == ()
    assert credentials_in_document(b'"token": "abc123' + end.encode() + b'x"').kinds == (
        () if end != '"' else (BY_NAME,)
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("password = ab12", True),
        ("password = ab1", False),
        ("password:ab12", True),
        ("password\t=\t'ab12'", True),
        ("password = ab12  \t\r", True),
        ("password = ab12 # not that", False),
        ("password = ab12 cd34", False),
        ("password = get(ab12)", False),
        ("password = [ab12]", False),
        ("password = ab12;", False),
        ("password" + " " * 9 + "=" + " " * 9 + "ab12" + " " * 9, True),
        ("password" + " " * 10 + "=ab12", False),
    ],
)
def test_a_setting_is_a_value_alone_on_its_line(line: str, found: bool) -> None:
    for text in (line, f"{line}\n", f"a = 1\n{line}\nb = 2\n"):
        assert credentials_in_file(b"srv", b"x.ini", text.encode()).kinds == ((BY_NAME,) if found else ())


OWN = {
    ".netrc": f"machine h login bob password {PASSWORD}",
    "_netrc": f"password\n {PASSWORD}",
    ".pgpass": f"# comment\nhost:5432:db:bob:{PASSWORD}\n",
    ".htpasswd": f"bob:$apr1${PASSWORD}\n",
    "shadow": f"root:*:1::::::\nbob:$6$x${PASSWORD}:1::::::\n",
    "kaggle.json": f'{{"username": "bob", "key": "{made_up("kaggle", 32, HEX)}"}}',
    "rclone.conf": f"[s3]\npass = {PASSWORD}\n",
    "kubeconfig": f"client-key-data: {made_up('kube', 40)}\n",
    "config": f"client-key-data: {made_up('kube', 40)}\n",
}


@pytest.mark.parametrize("name", OWN)
def test_a_file_that_is_made_to_hold_credentials_is_read_in_its_own_way(name: str) -> None:
    kind = f"password in {name}"
    assert credentials_in_file(b"etc", name.encode(), OWN[name].encode()).kinds == (kind,)
    assert kind not in credentials_in_file(b"etc", b"notes", OWN[name].encode()).kinds
    assert should_search(name.encode(), SearchScope.NAMED_FILES)


@pytest.mark.parametrize("form", ["$apr1$", "$2a$", "$2b$", "$2y$", "{SHA}"])
def test_a_hashed_password_is_one_whatever_its_hash(form: str) -> None:
    line = f"bob:{form}{PASSWORD}".encode()
    assert credentials_in_file(b"srv", b".htpasswd", line).kinds == ("password in .htpasswd",)


KNOWN = (
    ".pypirc pip.conf .npmrc .yarnrc .yarnrc.yml .git-credentials .my.cnf .env credentials .dockercfg .s3cfg"
    " .boto id_rsa id_ed25519 id_ecdsa id_dsa application_default_credentials.json .vault-token .terraformrc"
    " secrets.yaml hosts.yml"
)


def test_files_that_are_known_to_hold_credentials_are_read_even_in_a_library() -> None:
    names = KNOWN.split()
    assert [name for name in names if not should_search(name.encode(), SearchScope.NAMED_FILES)] == []
    assert [name for name in names if should_search(b"other-" + name.encode(), SearchScope.NAMED_FILES)] == []
    setting = f"password = {PASSWORD}\n".encode()
    assert [n for n in names if credentials_in_file(b"srv", n.encode(), setting).kinds != (BY_NAME,)] == []


CARES = {
    SearchScope.NAMED_FILES: "a/site-packages b/dist-packages/x app/node_modules conda-meta x/python3"
    " x/python3.11/y x/share/doc usr/lib usr/lib64/x usr/share usr/include usr/src lib lib64/x proc sys dev"
    " boot var/lib/dpkg var/lib/apt/lists usr/local/lib usr/local/lib64 usr/local/include usr/local/share"
    " opt/conda/lib opt/rocm-7.0/lib64 opt/rocm/share opt/conda/pkgs/x opt/rocm/llvm opt/rocm/include",
    SearchScope.NO_CODE: "app/lib opt/x/lib64/y home/lib/z var/lib",
    SearchScope.ALL_TEXT: "app etc root/.ssh usr/local/bin var opt/rocm srv/library usr proceedings",
}


@pytest.mark.parametrize("scope", CARES)
def test_directories_of_libraries_are_read_with_less_care_than_those_of_services(scope: SearchScope) -> None:
    assert [place for place in CARES[scope].split() if search_scope(place.encode()) is not scope] == []
    assert search_scope(b"") is SearchScope.ALL_TEXT


def test_files_without_settings_are_not_read() -> None:
    endings = (
        "so pyc pyo h hpp c cc cpp cu a o mo gz xz bz2 zst zip whl jar png jpg jpeg gif ico svg woff woff2"
        " ttf css map safetensors gguf onnx pt pth bin npy npz parquet db sqlite sqlite3 co hsaco dat crt po"
        " md rst htm html PNG"
    )
    names = [f"x.{ending}".encode() for ending in endings.split()]
    assert [
        name
        for name in names
        if should_search(name, SearchScope.ALL_TEXT) or should_search(name, SearchScope.NO_CODE)
    ] == []
    assert [name for name in names if not should_search(name + b".txt", SearchScope.NO_CODE)] == []


def test_code_is_read_for_quoted_values_where_no_library_is() -> None:
    endings = "py pyi js mjs ts go java rb json yaml yml toml tf ipynb php lua xml"
    names = [f"x.{ending}".encode() for ending in endings.split()]
    for scope, reads in (
        (SearchScope.ALL_TEXT, True),
        (SearchScope.NO_CODE, False),
        (SearchScope.NAMED_FILES, False),
    ):
        assert [name for name in names if should_search(name, scope) is not reads] == []
    call = f'f(token="{PASSWORD}")'.encode()
    assert [name for name in names if credentials_in_file(b"app", name, call).kinds != (BY_NAME,)] == []


def test_other_text_is_read_everywhere_but_in_libraries_and_not_as_code() -> None:
    assert [should_search(b"notes", scope) for scope in SearchScope] == [False, True, True]
    assert credentials_in_file(b"app", b"notes", f'f(token="{PASSWORD}")'.encode()).kinds == ()
    assert credentials_in_file(b"app", b"notes", f"token = {PASSWORD}".encode()).kinds == ()


def test_settings_are_read_for_values_without_quotes_but_not_those_of_the_system() -> None:
    files = (
        "env x.env x.ini x.CFG x.conf x.properties x.sh x.bash x.yaml x.yml x.toml .npmrc .cnf x.s3cfg .boto"
        " x.txt x.env.local .env.production"
    )
    names = [name.encode() for name in files.split()]
    setting = f"token = {PASSWORD}\n".encode()
    assert [name for name in names if credentials_in_file(b"srv", name, setting).kinds != (BY_NAME,)] == []
    assert [name for name in names if credentials_in_file(b"etc/x", name, setting).kinds] == []


def test_a_file_with_a_nul_in_its_first_1024_bytes_is_no_text() -> None:
    text = f"hf: {token('hf_', 34)}\n".encode()
    assert credentials_in_file(b"app", b"x", text + b"." * (1023 - len(text)) + b"\0").kinds == ()
    assert credentials_in_file(b"app", b"x", text + b"." * (1024 - len(text)) + b"\0").kinds == (
        "Hugging Face token",
    )


def test_files_are_looked_through_up_to_256_kib() -> None:
    assert SCANNED_BYTES == 262_144


def test_kinds_are_reported_in_the_same_order_in_every_run() -> None:
    text = "\n".join(text for _, text in FORMS)
    for kinds in (
        credentials_in_text(text).kinds,
        credentials_in_document(text.encode()).kinds,
        credentials_in_file(b"", b"x", text.encode()).kinds,
    ):
        assert len(kinds) > 15
        assert list(kinds) == sorted(kinds)


# Options of clients: `-u bob:password` is a login for curl, and a user and group elsewhere.


def test_a_login_belongs_to_a_client_at_most_200_bytes_before_it() -> None:
    near, far = ("curl " + "x" * (200 - len("curl ")), "curl " + "x" * (201 - len("curl ")))
    for before in ("", "y" * 300 + " "):
        assert credentials_in_text(f"{before}{near} -u bob:{PASSWORD}").kinds == ("login option",)
        assert credentials_in_text(f"{before}{far} -u bob:{PASSWORD}").kinds == ()


@pytest.mark.parametrize("between", ["\n", "|", ";", "&&"])
def test_a_login_belongs_to_the_client_of_its_own_command(between: str) -> None:
    assert credentials_in_text(f"curl host {between} run -u bob:{PASSWORD}").kinds == ()
    assert credentials_in_text(f"wget host {between} curl -u bob:{PASSWORD}").kinds == ("login option",)
    assert credentials_in_text(f"run -u bob:{PASSWORD} {between} curl host").kinds == ()


# Credentials inside one another


def test_what_several_signs_find_is_redacted_once_and_whole() -> None:
    github = token("ghp_", 36)
    assert redacted(f"A_TOKEN={github}.more x") == "A_TOKEN=[redacted] x"
    assert credentials_in_text(f"A_TOKEN={github}.more x").kinds == (BY_NAME,)
    assert redacted(f"A_TOKEN=db://bob:{PASSWORD}@h/x y") == "A_TOKEN=[redacted] y"
    assert redacted(f'A_TOKEN="{github}"B_TOKEN={github}') == 'A_TOKEN="[redacted]"B_TOKEN=[redacted]'


def test_what_overlaps_is_redacted_to_its_last_byte() -> None:
    assert redacted(f"db://bob:{PASSWORD}TOKEN=abcd@host.x y") == "db://bob:[redacted] y"


def test_credentials_side_by_side_are_two() -> None:
    slack = token("xoxb-", 254) + "-"  # as long as one may be
    text = f"{slack}{token('ghp_', 36)}"
    assert credentials_in_text(text).kinds == ("GitHub token", "Slack token")
    assert redacted(text) == "[redacted][redacted]"


def test_text_with_lone_surrogates_is_redacted_all_the_same() -> None:
    assert redacted(f"\udc80 A_TOKEN={PASSWORD}\udc80 é") == "\udc80 A_TOKEN=[redacted] é"
    assert credentials_in_text(f"\udc80 A_TOKEN={PASSWORD}").kinds == (BY_NAME,)
