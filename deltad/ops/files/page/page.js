// Brings the page up to date in its place, so that nobody loses theirs; without it the page reloads itself.
(() => {
  const renew = async () => {
    try {
      const reply = await fetch(location.href, { cache: "no-store" });
      const next = new DOMParser().parseFromString(await reply.text(), "text/html").querySelector("main");
      if (reply.ok && next) document.querySelector("main").replaceWith(next);
      document.body.classList.toggle("old", !reply.ok);
    } catch {
      document.body.classList.add("old");
    }
  };
  setInterval(() => document.hidden || renew(), 5000);
})();
