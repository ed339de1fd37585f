"""The demo: real processes on this machine train on handwritten digits, with one method after another. `rumor demo` shows it."""
