"""What a launch script of bash would run: variables, arrays, expansions and conditions, without running anything."""
