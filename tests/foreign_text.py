"""A name with control characters, as another process or a file may have it."""

# Clears the screen, sets the title, rings; C1's form of it; ends the line; reverses the order of the text.
NAME = "a\x1b[2J\x1b]0;b\x07\x9b2J\r\n\u202ec\ud800"
SHOWN = r"a\x1b[2J\x1b]0;b\x07\x9b2J\r\n\u202ec\ud800"


def shows_no_control_characters(text):
    """Checks a text with the name in it."""
    assert r"a\x1b[2J" in text
    assert {c for c in text if not c.isprintable()} <= {"\n"}
