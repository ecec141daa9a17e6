"""Who is who: certificates of a run, connections that show them, and who may call what."""
