"""The commands: one file each, loaded when it is called."""
