"""Hostile text: escapes from folders, markup, formulas, queries and terminals."""

TEXTS = (
    "../../../escaped", "..", "/etc/passwd", "a\0b", "x" * 4096, "right \u202eto left\u202c \u200f",
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "=cmd()", "+1+cmd|'/c calc'!A0", "-2@SUM(A1)",
    "@import", "\\input{/etc/passwd}", "\\write18{id} $x_1^2$ 5% & # ~", "a | b || c",
    "one\ntwo\r\nthree\u2028four\x85five", "\x1b[31mred\x1b]0;title\x07\x9b31m",
    "[bold red]markup[/bold red] [link=http://x]l[/link] [/]", "{{ 7 * 7 }} {% raw %} ${HOME} $(id) `id`",
    "'; DROP TABLE runs; --", "%s%n{0.__class__}", "--out=/etc", "", " ", "\t", "\ufeff\u200b", "con.png", "NaN",
    "caf\u00e9 \U0001f431",
)  # fmt: skip
