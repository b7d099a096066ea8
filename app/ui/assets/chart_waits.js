// Stands before the module of Plotly's charts (app/frontend.py): running that takes most of a second, in which nothing
// of the page is painted. What has come so far is painted first, the picture of a schedule with it.
{
  const MOST = 1000; // milliseconds, where frames are not drawn: of a page in the background
  await new Promise(go => {
    setTimeout(go, MOST);
    const look = () => {
      const waits = document.querySelector("[data-or-waits]");
      if (!waits && [...document.querySelectorAll(".or-first img")].every(image => image.complete))
        requestAnimationFrame(() => setTimeout(go));
      else setTimeout(look, 10);
    };
    requestAnimationFrame(look);
  });
}
