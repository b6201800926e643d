"""A plugin of the command line or of an ini file."""
