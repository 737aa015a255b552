error: /tmp/foeb/t/dc/config.json isn't a configuration that the Docker CLI can have written
  correct it, or move it away: mv -- /tmp/foeb/t/dc/config.json /tmp/foeb/t/dc/config.json.old
