"""Values that a hostile catalog could hold: what pip, apt, find and an engine read as more than a name."""

PATHS = (
    "/dir/pkg",
    "./pkg",
    "../pkg",
    "dir/pkg",
    "pkg/",
    "~/pkg",
    ".",
    "..",
    ".pkg",
    "C:\\pkg",
    "\\\\host\\pkg",
)
URLS = (
    *(
        "file:///dir/pkg",
        "file:/dir/pkg",
        "FILE:///dir/pkg",
        "file://localhost/dir/pkg",
        "file:///p-1.0.tar.gz",
    ),
    *("http://h/p-1.0.tar.gz", "https://h/p.zip", "HTTPS://h/p-1.0.tar.gz", "ftp://h/p.tgz", "//h/p.zip"),
    *("https://h/p.tar.gz#egg=p", "https://u:p@h/p.zip", "https://h/p.zip#sha256=00", "data:,p", "ssh://h/p"),
)
REPOSITORIES = (
    *("git+https://h/p.git", "git+ssh://git@h/p.git", "git+file:///dir/p", "git+http://h/p@main#egg=p"),
    *("git+git://h/p", "git+git@h:p.git", "git+https://h/p#subdirectory=s", "hg+https://h/p", "hg+ssh://h/p"),
    *("hg+file:///p", "svn+https://h/p", "svn+ssh://h/p", "svn+svn://h/p", "bzr+https://h/p", "bzr+lp:p"),
    *("git+ext::sh -c touch% x", "git@h:p.git", "git+ssh://-oProxyCommand=x/p"),
)
DIRECT = (
    *(f"p @ {there}" for there in (*PATHS[:4], *URLS, *REPOSITORIES)),
    *("p@file:///dir/p", "p@/dir/p", "p[x]@file:///p", "p [x] @ https://h/p.zip", "p@git+https://h/p"),
    *("p @ file:///dir/p ; python_version>'3'", "p @ file:///p\n", "p@", "p @ p"),
)
ARCHIVES = (  # of the current directory: pip takes a name with such an end for a file
    *("p.zip", "p.whl", "p-1.0-py3-none-any.whl", "p-1.0.tar.gz", "p.tgz", "p.tar", "p.tar.bz2", "p.tbz"),
    *(
        "p.tar.xz",
        "p.txz",
        "p.tlz",
        "p.tar.lz",
        "p.tar.lzma",
        "p.ZIP",
        "p.Tar.Gz",
        "p.zip[x]",
        "p.tar.gz [x]",
    ),
    *("p==1.0+a.zip", "p==1.0+a.tar.gz", "p===1.zip", "p>=1.whl", "p==1,<2.tgz", "p.tar.zst"),
)
OPTIONS = (
    *(
        "-r/etc/passwd",
        "-r x.txt",
        "-e .",
        "-e git+https://h/p",
        "--editable=.",
        "--index-url=http://h",
        "-i x",
    ),
    *("--extra-index-url=http://h", "--find-links=/dir", "-f /dir", "--no-binary=:all:", "--pre", "-c x.txt"),
    *("p --no-binary=p", "p --global-option=x", "p --config-settings=x=y", "p --hash=sha256:00", "--", "-"),
)
ODD = (
    *(
        "p; python_version<'3'",
        "p ; extra == 'x'",
        "p;",
        "p>=1;os_name=='nt'",
        "p (>=1)",
        "p>=",
        "p>=1,",
        "p,q",
    ),
    *(
        "p q",
        "p\nq",
        "p\\\n",
        "p #c",
        "${HOME}",
        "$(touch x)",
        "`touch x`",
        "p|q",
        "p&&q",
        "p>q>r",
        "p[",
        "p[]",
    ),
    *(
        "p[x",
        "p[../x]",
        "p[x y]",
        "",
        " ",
        " p",
        "p\t",
        "p\x00",
        "\u043fp",
        "p\u2028",
        "p" * 300,
        "@p",
        "p*",
        "p=1",
    ),
)
REQUIREMENTS = (*PATHS, *URLS, *REPOSITORIES, *DIRECT, *ARCHIVES, *OPTIONS, *ODD)
PLAIN_REQUIREMENTS = (  # what such a list is for
    *("p", "P_q.r-s", "p>=2", "p >= 2, < 3", "p==1.*", "p~=1.4", "p!=1.5", "p===1.0", "p==1.0+cpu", "p[x]"),
    *("p[x,y-z]>=1", "p [x] == 1", "torch[device-{gpu_target}]", "zip", "p.zip>=1", "p==1!2.0", "p>=1rc1"),
)
PACKAGES = (
    *(
        "--x",
        "-o=Dir::Etc=x",
        "./p.deb",
        "/dir/p.deb",
        "../p.deb",
        "p.deb/",
        "p=1.0",
        "p/stable",
        "p,q",
        "p q",
    ),
    *(
        "p-",
        "*",
        "p*",
        "?name(p)",
        "~np",
        "!p",
        "^p$",
        "p$",
        "p|q",
        "(p)",
        "p;touch x",
        "$(touch x)",
        "`x`",
        "P",
    ),
    *("p\n", "p\nq", "", " p", ".p", "+p", ":amd64", "p:", "p:a:b", "p\x00", "%p", "@p", "p\\", "p'q", 'p"q'),
)
GLOBS = (
    *(
        "/usr",
        "//usr",
        "usr/",
        "usr//x",
        "./usr",
        "../usr",
        "usr/../../x",
        "usr/..",
        "..",
        ".",
        "",
        "/",
        "usr/./x",
    ),
    *("$(touch x)", "`x`", "x;y", "x y", "x\ny", "x\n", "~root", "x|y", "x&y", "{a,b}", "x\\y", "x\x00"),
)
NAMES = (
    "",
    "-x",
    "x-",
    "x y",
    "X",
    "x/y",
    "../x",
    "x\n",
    "x:y",
    "x@y",
    "$x",
    "x.y",
    "x_y",
    "x" * 200,
    "\u0445",
)
SOURCE_NAMES = ("", "-x", "x y", "x\n", "\x1b[2J", "x/y", "$(x)", "x;y", ".x")
REFERENCES = (
    *(
        "--x",
        "a b",
        "",
        "http://h/x",
        "https://h/x:1",
        "file:///x",
        "/x",
        "./x",
        "../x",
        "x:",
        "x@",
        "x@sha256:0",
    ),
    *("X", "x\n", "x:1\n", "$(x)", "x:1:2", "x//y", "docker://x", "x@sha256:../x", "-v/:/x"),
)
INDEXES = (
    "--pre",
    "",
    "h",
    "/dir",
    "./dir",
    "ftp://h",
    "git+https://h",
    "file:x",
    "https://",
    "http://h x",
    "http://h\n",
)
SUITES = ("--setup-hook=touch x", "/x", "./x", "x;y", "X", "", "-", "x y", "x\n", "$(x)", "http://h/x", "1x")
FOLDERS = ("", "/x", "../x", "x/../y", "x/", ".x", "-x", "x y", "x\n", "~/x", "x//y", "x" * 300)
