// Names and keyboard focus that Material's pages lack.
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const scrolled of document.querySelectorAll("pre, pre > code, .md-typeset__scrollwrap")) {
    scrolled.tabIndex = 0;
  }
});
