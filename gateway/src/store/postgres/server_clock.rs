//! The clock of the server.

use gw_shared::clock::monotonic_us;

use super::super::StoreError;
use super::engine::{CALL, Engine, Session};
use super::{PostgresStore, column};
use crate::clock::ClockReading;

const CLOCK: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

impl PostgresStore {
    /// Reads the clock of the server.
    pub(crate) fn read_clock(&mut self) -> Result<ClockReading, StoreError> {
        read(self.checked()?)
    }
}

pub(super) fn read(engine: &mut Engine) -> Result<ClockReading, StoreError> {
    let (row, sent_us) = engine.call(CALL, async |session: &mut Session| {
        let statement = session.prepare(CLOCK).await?;
        let sent_us = monotonic_us();
        Ok((session.client.query_one(&statement, &[]).await?, sent_us))
    })?;
    Ok(ClockReading::received(column(&row, 0)?, sent_us))
}
