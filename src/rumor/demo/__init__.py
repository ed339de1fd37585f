"""The demo: real processes on this machine train on handwritten digits, with one method after the other. `rumor demo` runs it."""
