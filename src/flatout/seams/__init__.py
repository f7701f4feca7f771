"""The four places where flatout touches a script, and the process that runs one."""
