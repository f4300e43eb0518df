"""A reader of launch scripts in bash: it follows variables, conditions, loops and functions, and runs nothing."""
