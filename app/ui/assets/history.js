// A page puts into its address what it shows, so that a link shows what its sender saw. Streamlit makes an entry of the
// browser's history of each: from Schedule it took four times Back to Live, or came to one page with the other's address.
// So there is one entry for what somebody does, whatever comes of it; what a page does by itself changes the newest.
{
  let acted = false;
  for (const kind of ["pointerdown", "click", "keydown"]) addEventListener(kind, () => { acted = true; }, true);
  addEventListener("popstate", () => { acted = false; }, true);
  const push = history.pushState;
  history.pushState = function (...entry) {
    const make = acted ? push : history.replaceState;
    acted = false;
    make.apply(this, entry);
  };
}
