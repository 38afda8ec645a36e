//! The clock of the server.

use gw_base::clock::ClockReading;
use gw_shared::clock::monotonic_us;
use tokio_postgres::Row;

use super::engine::{CALL, Engine, SqlSession};
use crate::StoreError;
use crate::postgres::schema::MIGRATIONS;
use crate::postgres::{PostgresStore, column, schema};

const CLOCK: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
const CLOCK_AND_SCHEMA: &str =
    "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, schema FROM gw.region";

impl PostgresStore {
    /// Reads the clock of the server. Also notes the version of the tables: changes are refused
    /// from now on if it is too new for this program.
    pub fn read_clock(&mut self) -> Result<ClockReading, StoreError> {
        let (reading, row) = ask(self.checked()?, CLOCK_AND_SCHEMA)?;
        let found = usize::try_from(column::<i32>(&row, 1)?).unwrap_or(0);
        let before = self
            .source
            .known
            .note_newer_schema(Some(found).filter(|found| !schema::is_usable(*found)));
        match self.refuse_newer() {
            Err(error) if before.is_none() => {
                tracing::error!(%error, "relaying goes on; changes are refused");
            }
            _ => {}
        }
        Ok(reading)
    }

    /// Fails if the tables have become too new for this program while it was connected.
    pub(crate) fn refuse_newer(&self) -> Result<(), StoreError> {
        match self.source.known.newer_schema() {
            Some(found) => Err(StoreError::NewerSchema {
                found,
                known: MIGRATIONS.len(),
            }),
            None => Ok(()),
        }
    }
}

pub(crate) fn read(engine: &mut Engine) -> Result<ClockReading, StoreError> {
    ask(engine, CLOCK).map(|(reading, _)| reading)
}

fn ask(engine: &mut Engine, sql: &'static str) -> Result<(ClockReading, Row), StoreError> {
    let (row, sent_us) = engine.call(CALL, async |session: &mut SqlSession| {
        let statement = session.prepare(sql).await?;
        let sent_us = monotonic_us();
        Ok((session.client.query_one(&statement, &[]).await?, sent_us))
    })?;
    Ok((ClockReading::received(column(&row, 0)?, sent_us), row))
}
