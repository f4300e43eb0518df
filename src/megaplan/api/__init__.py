"""The functions of `import megaplan`, one file each; `diff` and `check` share one. The command line renders their results."""
