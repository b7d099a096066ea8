// The framework follows a colour scheme that changes at once; what pages draw themselves, charts among it, has its
// colours from their last run, and could hardly be read. So they run anew, by the framework's own key for it, once it
// can tell the new scheme.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  const key = { key: "r", code: "KeyR", keyCode: 82, which: 82, bubbles: true };
  setTimeout(() => {
    for (const kind of ["keydown", "keyup"]) document.body.dispatchEvent(new KeyboardEvent(kind, key));
  }, 500);
});
