"""How each item is measured: a probe runs the module and looks at what comes out."""
