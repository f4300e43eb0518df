"""Plans as other frameworks' launch files, with the settings that each framework cannot express. One file per host."""
