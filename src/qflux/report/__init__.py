"""One HTML page about a run or several, made of what `runs` reads; `page` puts it together."""
