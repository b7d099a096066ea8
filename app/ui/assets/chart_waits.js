// Stands before the module of Plotly's charts (app/runtime/patches.py): running that takes most of a second, in which nothing
// of the page is painted. What is to come before the chart is painted first, the picture of a schedule with it.
{
  const MOST = 3000; // milliseconds, as what is kept out of sight (console.css)
  // It is asked for while React still makes what is to be painted. A chart's grey box is there once that is on the page.
  const PLACE = ["wide-chart", "catalog-chart", "simulation-", "planner-"]
    .map(key => `[class*="st-key-${key}"] [data-testid="stSkeleton"]`).join();
  const there = () => document.querySelector(PLACE) && !document.querySelector("[data-or-waits]") &&
    [...document.querySelectorAll(".or-first img")].every(image => image.complete);
  const frame = requestAnimationFrame;
  await new Promise(go => {
    if (document.hidden) return go(); // of a page in the background no frame is drawn
    setTimeout(go, MOST);
    const look = () => there() ? frame(() => frame(() => setTimeout(go))) : setTimeout(look, 10);
    look();
  });
}
