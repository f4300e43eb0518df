"""Plans as other frameworks' launch files, and what each of them cannot express. One file a host."""
