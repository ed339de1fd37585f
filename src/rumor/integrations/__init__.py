"""Integrations with other libraries, one file each. `import rumor` imports none of them."""
