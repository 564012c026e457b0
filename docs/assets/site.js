// What scrolls can be scrolled by the keyboard too.
addEventListener("load", () => {
  for (const each of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) {
    each.tabIndex = 0;
  }
});
