// Pages that carry this script follow the run: the server says when something changed, and the page's own content is loaded
// again. Without scripts a page is what it was when it was loaded.
"use strict";
const source = new EventSource("/api/v1/changes");
let loading = false;
source.onmessage = async () => {
  if (loading || document.hidden || document.querySelector("main :focus")) return;
  loading = true;
  try {
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const places = [...document.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.querySelectorAll(".scroll").forEach((each, i) => { each.scrollLeft = places[i] || 0; });
  } finally {
    loading = false;
  }
};
